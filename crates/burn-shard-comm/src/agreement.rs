//! Numbers that each rank has of its own, and all ranks need the same of: metrics, and whether to stop.

use crate::{communicator::ReduceOp, error::Error, group::ProcessGroup};

impl ProcessGroup {
    /// The mean of all ranks' `value`s, each counted `weight` times; the same bits on every rank. One
    /// collective of 16 bytes.
    ///
    /// The mean loss over all samples, for example, from each rank's mean and its number of samples. A rank
    /// that has nothing to add gives weight 0, and its value does not matter. Without any weight the mean
    /// is NaN.
    ///
    /// ```
    /// # use burn_shard_comm::{Error, ProcessGroup};
    /// let means = ProcessGroup::spawn(3, |group| {
    ///     // Rank 2 had no data.
    ///     let (accuracy, samples) = [(0.5, 10.0), (0.8, 30.0), (f64::NAN, 0.0)][group.rank()];
    ///     group.mean(accuracy, samples)
    /// })?;
    /// for mean in means {
    ///     assert_eq!(mean?, (0.5 * 10.0 + 0.8 * 30.0) / 40.0);
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_reduce`](crate::Communicator::all_reduce).
    pub fn mean(&self, value: f64, weight: f64) -> Result<f64, Error> {
        let part = if weight == 0.0 { 0.0 } else { value * weight };
        let mut sums = [part, weight];
        self.all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok(sums[0] / sums[1])
    }

    /// Whether `flag` is set on any rank; the same answer on every rank. One collective of one byte.
    ///
    /// Decides together what one rank alone must not: to stop early, to leave out a batch, to save now.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_reduce`](crate::Communicator::all_reduce).
    pub fn any(&self, flag: bool) -> Result<bool, Error> {
        let mut any = [u8::from(flag)];
        self.all_reduce(&mut any, ReduceOp::Max)?;
        Ok(any[0] > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_of_one_rank_is_seen_by_all() {
        for set in [None, Some(0), Some(2)] {
            let seen = ProcessGroup::spawn(3, |group| {
                group.any(set == Some(group.rank())).expect("all ranks ask")
            });
            assert_eq!(seen.expect("no rank fails"), [set.is_some(); 3]);
        }
    }
}
