//! Which old checkpoints are kept when a new one is published.

use std::fs;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;

use crate::Error;
use crate::directory::{Name, REMOVED, checkpoints, sync_directory};

/// Which checkpoints are kept. The one just published always is.
///
/// ```
/// use std::num::{NonZeroU64, NonZeroUsize};
/// use burn_shard_checkpoint::Keep;
///
/// // The three newest, and each whose step is a multiple of 10 000.
/// let keep = Keep::last(NonZeroUsize::new(3).unwrap()).and_every(NonZeroU64::new(10_000).unwrap());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    last: Option<NonZeroUsize>,
    every: Option<NonZeroU64>,
}

impl Keep {
    /// All are kept.
    pub const ALL: Self = Self {
        last: None,
        every: None,
    };

    /// The `count` that were published last are kept.
    #[must_use]
    pub const fn last(count: NonZeroUsize) -> Self {
        Self {
            last: Some(count),
            every: None,
        }
    }

    /// Those of every `steps`-th step are kept as well.
    #[must_use]
    pub const fn and_every(self, steps: NonZeroU64) -> Self {
        Self {
            last: self.last,
            every: Some(steps),
        }
    }

    /// Those of `names`, oldest first and the newest last, that are not kept.
    fn obsolete(self, names: &[Name]) -> Vec<Name> {
        let Some(last) = self.last else {
            return Vec::new();
        };
        let old = names.len().saturating_sub(last.get());
        let kept = |name: &Name| self.every.is_some_and(|every| name.step % every == 0);
        names[..old]
            .iter()
            .copied()
            .filter(|name| !kept(name))
            .collect()
    }

    /// Removes what is not kept beside `newest`, which was published. Returns what it removed, and
    /// what it could not.
    pub(crate) fn apply(self, root: &Path, newest: Name, nonce: u64) -> (Vec<String>, Vec<Error>) {
        let (mut removed, mut failed) = (Vec::new(), Vec::new());
        let names = match checkpoints(root) {
            Ok(names) => names,
            Err(error) => return (removed, vec![error]),
        };
        for name in self
            .obsolete(&names)
            .into_iter()
            .filter(|&name| name != newest)
        {
            match remove(root, name, nonce) {
                Ok(()) => removed.push(name.to_string()),
                Err(error) => failed.push(error),
            }
        }
        (removed, failed)
    }
}

/// Takes a checkpoint's name away before its files, so that half of one never looks like one.
fn remove(root: &Path, name: Name, nonce: u64) -> Result<(), Error> {
    let path = root.join(name.to_string());
    let hidden = root.join(name.hidden(nonce, REMOVED));
    fs::rename(&path, &hidden).map_err(Error::io("remove", &path))?;
    sync_directory(root)?;
    fs::remove_dir_all(&hidden).map_err(Error::io("remove", &hidden))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(steps: &[u64]) -> Vec<Name> {
        let numbered = steps.iter().zip(0..);
        numbered
            .map(|(&step, sequence)| Name { sequence, step })
            .collect()
    }

    fn obsolete(keep: Keep, steps: &[u64]) -> Vec<u64> {
        keep.obsolete(&names(steps))
            .into_iter()
            .map(|name| name.step)
            .collect()
    }

    #[test]
    fn the_last_are_kept_and_of_the_others_every_kth_step() {
        let two = Keep::last(NonZeroUsize::new(2).unwrap());
        assert_eq!(obsolete(two, &[10, 20, 30, 40]), [10, 20]);
        let also = two.and_every(NonZeroU64::new(20).unwrap());
        assert_eq!(obsolete(also, &[10, 20, 30, 40, 50]), [10, 30]);
        assert_eq!(obsolete(Keep::ALL, &[10, 20, 30]), [0; 0]);
        assert_eq!(obsolete(two, &[10]), [0; 0]);
    }

    #[test]
    fn what_was_published_last_is_newest_also_after_going_back_to_an_earlier_step() {
        let one = Keep::last(NonZeroUsize::new(1).unwrap());
        assert_eq!(obsolete(one, &[10, 20, 30, 15]), [10, 20, 30]);
    }
}
