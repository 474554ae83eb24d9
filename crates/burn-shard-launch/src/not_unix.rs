//! Systems that have neither process groups nor signals, which are what a launch is made of.

use crate::{error::LaunchError, options::Options, outcome::Outcome};

/// Refuses: processes are launched on Unix only.
///
/// # Errors
///
/// [`LaunchError::NotUnix`].
pub fn launch(_options: &Options) -> Result<Outcome, LaunchError> {
    Err(LaunchError::NotUnix)
}
