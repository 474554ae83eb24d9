//! Which tensor of a checkpoint is loaded into which of the program: renaming, and what is missing,
//! unexpected or different.

use std::collections::HashMap;
use std::fmt;

use regex::Regex;

use crate::{DType, DTypePolicy, Error, TensorName};

/// A tensor that a program has a place for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Path and role.
    pub name: TensorName,
    /// Element type.
    pub dtype: DType,
    /// Full shape.
    pub shape: Vec<usize>,
}

/// Rules by which paths of a checkpoint become paths of a program. Roles stay.
///
/// ```
/// use burn_shard_checkpoint::Renames;
///
/// let renames = Renames::new().rule(r"^bert\.", "")?.rule(r"LayerNorm\.(\w+)$", "norm.$1")?;
/// assert_eq!(renames.apply("bert.encoder.LayerNorm.gamma"), "encoder.norm.gamma");
/// # Ok::<(), burn_shard_checkpoint::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Renames {
    rules: Vec<(Regex, String)>,
}

impl Renames {
    /// No rules: paths are equal.
    #[must_use]
    pub const fn new() -> Self {
        Self { rules: Vec::new() }
    }

    /// Adds a rule, applied after those before it: every match of `pattern` becomes `replacement`, in
    /// which `$1` is the first group (`${1}` before a letter, digit or underscore).
    ///
    /// # Errors
    ///
    /// [`Error::BadPattern`].
    pub fn rule(mut self, pattern: &str, replacement: &str) -> Result<Self, Error> {
        let regex = Regex::new(pattern).map_err(|source| Error::BadPattern {
            pattern: pattern.into(),
            source: Box::new(source),
        })?;
        self.rules.push((regex, replacement.into()));
        Ok(self)
    }

    /// What a path becomes.
    #[must_use]
    pub fn apply(&self, path: &str) -> String {
        self.rules
            .iter()
            .fold(path.to_owned(), |path, (regex, replacement)| {
                regex.replace_all(&path, replacement.as_str()).into_owned()
            })
    }
}

/// A tensor of the checkpoint that has the name of one that is wanted, but not its shape or type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// What is wanted.
    pub wanted: Wanted,
    /// What is there, under its name in the checkpoint.
    pub found: Wanted,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, found } = self;
        write!(
            f,
            "{} is {:?} {:?}, wanted {:?} {:?}",
            wanted.name, found.dtype, found.shape, wanted.dtype, wanted.shape
        )
    }
}

/// What a checkpoint has for a program, by [`Checkpoint::resolve`](crate::Checkpoint::resolve).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolution {
    sources: HashMap<TensorName, TensorName>,
    /// Wanted, and not there.
    pub missing: Vec<TensorName>,
    /// There, and not wanted. Names of the checkpoint.
    pub unexpected: Vec<TensorName>,
    /// There, with another shape, or an element type that the policy does not allow.
    pub mismatched: Vec<Mismatch>,
}

impl Resolution {
    pub(crate) fn new(
        available: impl Iterator<Item = Wanted>,
        wanted: &[Wanted],
        renames: &Renames,
        policy: DTypePolicy,
    ) -> Result<Self, Error> {
        let mut order = Vec::new();
        let mut there: HashMap<TensorName, Wanted> = HashMap::new();
        for found in available {
            let renamed = TensorName {
                path: renames.apply(&found.name.path),
                role: found.name.role.clone(),
            };
            if let Some(first) = there.get(&renamed) {
                return Err(Error::RenameCollision {
                    first: first.name.clone(),
                    second: found.name,
                    renamed,
                });
            }
            order.push(renamed.clone());
            there.insert(renamed, found);
        }
        let mut resolution = Self::default();
        for wanted in wanted {
            match there.remove(&wanted.name) {
                None => resolution.missing.push(wanted.name.clone()),
                Some(found)
                    if found.shape == wanted.shape && policy.allows(found.dtype, wanted.dtype) =>
                {
                    resolution.sources.insert(wanted.name.clone(), found.name);
                }
                Some(found) => resolution.mismatched.push(Mismatch {
                    wanted: wanted.clone(),
                    found,
                }),
            }
        }
        let left = order.iter().filter_map(|renamed| there.remove(renamed));
        resolution.unexpected = left.map(|found| found.name).collect();
        Ok(resolution)
    }

    /// The name in the checkpoint of what is to be loaded into `wanted`.
    #[must_use]
    pub fn source(&self, wanted: &TensorName) -> Option<&TensorName> {
        self.sources.get(wanted)
    }

    /// How many tensors can be loaded.
    #[must_use]
    pub fn matched(&self) -> usize {
        self.sources.len()
    }

    /// Itself, if everything that is wanted is there, as it is wanted, and nothing else.
    ///
    /// # Errors
    ///
    /// [`Error::Unmatched`], which names all that differs.
    pub fn strict(self) -> Result<Self, Error> {
        if self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty() {
            return Ok(self);
        }
        Err(Error::Unmatched {
            missing: self.missing,
            unexpected: self.unexpected,
            mismatched: self.mismatched,
        })
    }
}
