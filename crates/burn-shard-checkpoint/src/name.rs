//! The names of tensors in a checkpoint: a module path and the role that the tensor plays for it.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Error;

/// What a tensor is for the parameter at its path: the parameter itself, or a piece of optimizer
/// state such as `moment_1`, `velocity` or `time`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Role(Cow<'static, str>);

impl Role {
    /// The parameter itself.
    pub const PARAMETER: Self = Self(Cow::Borrowed("parameter"));

    /// A role with this name. Whether the name is allowed is checked when it is written or read.
    pub fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Self(name.into())
    }

    /// The name as it is written in the manifest.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a tensor: unique in a checkpoint, equal on all ranks, and independent of any id that
/// a run gives out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorName {
    /// Module path, for example `encoder.layers.3.linear.weight`.
    pub path: String,
    /// What the tensor is for that path.
    pub role: Role,
}

impl TensorName {
    /// The parameter at `path`.
    pub fn parameter(path: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            role: Role::PARAMETER,
        }
    }

    /// The state `role` of the parameter at `path`, for example `moment_1`.
    pub fn state(path: impl Into<String>, role: impl Into<Cow<'static, str>>) -> Self {
        Self {
            path: path.into(),
            role: Role::new(role),
        }
    }

    /// The name of this tensor inside a safetensors file: the path for a parameter, and `role/path`
    /// for anything else.
    #[must_use]
    pub fn key(&self) -> String {
        if self.role == Role::PARAMETER {
            self.path.clone()
        } else {
            format!("{}/{}", self.role, self.path)
        }
    }

    /// # Errors
    ///
    /// [`Error::BadName`] for an empty name, a control character, a `/` in the role, or the name
    /// that safetensors reserves.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let reason = if self.path.is_empty() || self.role.as_str().is_empty() {
            "it is empty"
        } else if self.path.contains(char::is_control) || self.role.0.contains(char::is_control) {
            "it has a control character"
        } else if self.role.0.contains('/') {
            "a role has no slash"
        } else if self.path == "__metadata__" {
            "safetensors reserves it"
        } else {
            return Ok(());
        };
        Err(Error::BadName {
            name: self.clone(),
            reason,
        })
    }
}

/// Prints the path, and the role in parentheses: `encoder.weight (moment_1)`. Control characters
/// are escaped, as a name may come from a file that nobody has checked.
impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({})",
            self.path.escape_debug(),
            self.role.0.escape_debug()
        )
    }
}
