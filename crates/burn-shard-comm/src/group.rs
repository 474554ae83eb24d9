//! [`ProcessGroup`]: collectives on plain slices, for those who do not coalesce or overlap.

use std::{sync::Arc, time::Duration};

use crate::{
    communicator::{Communicator, ReduceOp},
    dtype::Element,
    error::Error,
    segments::{OwnedSegments, SegmentLayout, Segments, SlicesMut},
    spawn::Local,
    traffic::Traffic,
};

/// A handle to one rank's [`Communicator`], with collectives on slices.
///
/// The collectives wait until they are done, and copy their input once. All ranks have to call the
/// same ones in the same order; see [`Communicator`] for this and for errors.
///
/// # Examples
///
/// ```
/// # use burn_shard_comm::{Error, ProcessGroup, ReduceOp};
/// # fn main() -> Result<(), Error> {
/// let sums = ProcessGroup::spawn(3, |group| -> Result<f32, Error> {
///     let mut buffer = [1.0f32 + group.rank() as f32];
///     group.all_reduce(&mut buffer, ReduceOp::Sum)?;
///     Ok(buffer[0])
/// })?;
/// for sum in sums {
///     assert_eq!(sum?, 6.0);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ProcessGroup {
    communicator: Arc<dyn Communicator>,
}

impl ProcessGroup {
    /// A group as seen through `communicator`.
    #[must_use]
    pub fn new(communicator: Arc<dyn Communicator>) -> Self {
        Self { communicator }
    }

    /// The communicator, for lists of segments and for unfinished collectives.
    #[must_use]
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    /// Number of this rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    /// How long a call of this rank waits for the others.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.communicator.deadline()
    }

    /// Sets how long later calls of this rank wait for the others.
    pub fn set_deadline(&self, deadline: Duration) {
        self.communicator.set_deadline(deadline);
    }

    /// The sub-group of the ranks that call this with the same `color`, in the order of `key`, and of their
    /// ranks where keys are equal; none for a rank without a color. A collective.
    ///
    /// # Examples
    ///
    /// Rows and columns of a mesh of 2 x 2 ranks:
    ///
    /// ```
    /// # use burn_shard_comm::{Error, ProcessGroup, ReduceOp};
    /// # fn main() -> Result<(), Error> {
    /// ProcessGroup::spawn(4, |group| -> Result<(), Error> {
    ///     let (row, column) = (group.rank() / 2, group.rank() % 2);
    ///     let rows = group.split(Some(row), column)?.expect("every rank has a row");
    ///     let columns = group.split(Some(column), row)?.expect("every rank has a column");
    ///     let mut value = [group.rank() as f32];
    ///     rows.all_reduce(&mut value, ReduceOp::Sum)?;
    ///     assert_eq!(value, [[1.0], [5.0]][row]);
    ///     columns.all_reduce(&mut value, ReduceOp::Sum)?;
    ///     assert_eq!(value, [6.0]);
    ///     Ok(())
    /// })?
    /// .into_iter()
    /// .collect()
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// See [`Communicator::split`].
    pub fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Self>, Error> {
        Ok(self.communicator.split(color, key)?.map(Self::new))
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    ///
    /// See [`Communicator::barrier`].
    pub fn barrier(&self) -> Result<(), Error> {
        self.communicator.barrier()
    }

    /// Calls this rank has made and bytes it received, since the start.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.communicator.traffic()
    }

    /// Poisons the group on all ranks; see [`Communicator::abort`].
    pub fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
    }

    /// Every rank's `output` ends as the concatenation of all inputs, cut to its length.
    ///
    /// `shard_numel(output.len(), world_size)` has to be `input.len()`.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_gather`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.communicator
            .all_gather(owned(input), &[output.len()])?
            .finish(&mut SlicesMut(vec![output]))
    }

    /// `output` on rank `r` ends as the `r`-th shard of the reduced inputs, padded with zeros.
    ///
    /// `output.len()` has to be `shard_numel(input.len(), world_size)`.
    ///
    /// # Errors
    ///
    /// See [`Communicator::reduce_scatter`].
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Error> {
        self.communicator
            .reduce_scatter(owned(input), op)?
            .finish(&mut SlicesMut(vec![output]))
    }

    /// `buffer` ends as the reduction of all ranks' buffers.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_reduce`].
    pub fn all_reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.communicator
            .all_reduce(owned(buffer), op)?
            .finish(&mut SlicesMut(vec![buffer]))
    }

    /// `buffer` ends as that of rank `root`.
    ///
    /// # Errors
    ///
    /// See [`Communicator::broadcast`].
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<(), Error> {
        if self.rank() == root {
            return self.send(owned(buffer), root);
        }
        let layout = SegmentLayout {
            dtype: T::DTYPE,
            numels: vec![buffer.len()],
        };
        self.communicator
            .broadcast(None, layout, root)?
            .finish(&mut SlicesMut(vec![buffer]))
    }

    /// Returns the bytes of rank `root`, of any length; those of other ranks are ignored.
    ///
    /// Two collectives: the length, then the bytes.
    ///
    /// # Errors
    ///
    /// See [`Communicator::broadcast`].
    pub fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>, Error> {
        let mut length = [bytes.len() as u64];
        self.broadcast(&mut length, root)?;
        if self.rank() == root {
            let input = Arc::new(OwnedSegments(vec![bytes]));
            self.send(Arc::clone(&input) as _, root)?;
            // The others may still read it.
            return Ok(Arc::try_unwrap(input)
                .map_or_else(|shared| shared.0[0].clone(), |mut own| own.0.swap_remove(0)));
        }
        let mut received = vec![0u8; to_numel(length[0])];
        self.broadcast(&mut received, root)?;
        Ok(received)
    }

    /// Broadcasts `input` from this rank, the root, and waits until it is sent.
    fn send(&self, input: Arc<dyn Segments>, root: usize) -> Result<(), Error> {
        let layout = SegmentLayout::of(&*input);
        self.communicator
            .broadcast(Some(input), layout, root)?
            .wait()
    }

    /// Returns the bytes of every rank in rank order, of any lengths.
    ///
    /// Two collectives: the lengths, then the bytes, padded to the longest.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_gather`].
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let mut lengths = vec![0u64; self.world_size()];
        self.all_gather(&[bytes.len() as u64], &mut lengths)?;
        let longest = to_numel(lengths.iter().copied().max().unwrap_or(0));
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let mut all = OwnedSegments(vec![vec![0u8; longest * self.world_size()]]);
        self.communicator
            .all_gather(
                Arc::new(OwnedSegments(vec![padded])),
                &[longest * self.world_size()],
            )?
            .finish(&mut all)?;
        let all = &all.0[0];
        Ok(lengths
            .iter()
            .enumerate()
            .map(|(rank, &length)| all[rank * longest..][..to_numel(length)].to_vec())
            .collect())
    }

    /// Runs `f` once per rank, each on its own thread inside its own thread pool of
    /// `max(1, cores / world_size)` threads; results in rank order.
    ///
    /// # Errors
    ///
    /// See [`Local::spawn`].
    pub fn spawn<T: Send, F: Fn(Self) -> T + Sync>(
        world_size: usize,
        f: F,
    ) -> Result<Vec<T>, Error> {
        Local::new(world_size).spawn(f)
    }
}

fn owned<T: Element>(elements: &[T]) -> Arc<OwnedSegments<T>> {
    Arc::new(OwnedSegments(vec![elements.to_vec()]))
}

/// A length that began as a `usize` on another rank.
fn to_numel(length: u64) -> usize {
    usize::try_from(length).expect("a length of another rank should fit this one's usize")
}
