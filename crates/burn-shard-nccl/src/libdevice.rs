//! The one file of a CUDA toolkit that is needed at run time.
//!
//! CubeCL compiles kernels by itself, but `exp`, `log`, `tanh`, `erf` and others of its functions are linked
//! from NVIDIA's `libdevice.10.bc` when the first kernel that has one is compiled: in the middle of the first
//! forward of a transformer. A driver does not bring that file. So a program looks for it before it begins,
//! where CubeCL will.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::error::NcclError;

const FILE: &str = "nvvm/libdevice/libdevice.10.bc";
/// Names the toolkit; the others are not looked at then.
const VARIABLE: &str = "CUDA_PATH";
const ROOTS: [&str; 4] = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda", "/usr"];

/// Where CubeCL 0.11 finds `libdevice.10.bc`.
///
/// # Errors
///
/// If it does not; says where it looks, and what brings the file.
pub fn find_libdevice() -> Result<PathBuf, NcclError> {
    let named = env::var(VARIABLE).ok().map(PathBuf::from);
    find(named.as_deref(), &ROOTS.map(Path::new))
}

fn find(named: Option<&Path>, roots: &[&Path]) -> Result<PathBuf, NcclError> {
    // The first that has the folder, whether or not the file is there.
    let found = roots
        .iter()
        .map(|root| root.join(FILE))
        .find(|file| file.parent().is_some_and(Path::is_dir));
    let file = named.map_or_else(|| found.clone(), |root| Some(root.join(FILE)));
    if let Some(file) = file.filter(|file| file.is_file()) {
        return Ok(file);
    }
    let looked = match named {
        Some(root) => root.join(FILE).display().to_string(),
        None => roots
            .iter()
            .map(|root| root.join(FILE).display().to_string())
            .collect::<Vec<_>>()
            .join(", "),
    };
    let hidden = found.filter(|file| named.is_some() && file.is_file());
    Err(NcclError::LibdeviceMissing { looked, hidden })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("burn-shard-libdevice-{}-{name}", std::process::id());
            Self(env::temp_dir().join(name))
        }

        fn with_libdevice(self) -> Self {
            let file = self.0.join(FILE);
            fs::create_dir_all(file.parent().expect("a file is in a folder")).expect("writable");
            fs::write(file, b"BC").expect("writable");
            self
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _result = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_first_toolkit_that_has_it_is_taken() {
        let (none, first, second) = (
            Folder::new("none"),
            Folder::new("first").with_libdevice(),
            Folder::new("second").with_libdevice(),
        );
        let roots = [&*none.0, &*first.0, &*second.0];
        assert_eq!(find(None, &roots).expect("found"), first.0.join(FILE));
        assert_eq!(
            find(Some(&second.0), &roots).expect("found"),
            second.0.join(FILE)
        );
    }

    #[test]
    fn a_lack_names_the_file_the_places_and_the_package() {
        let (none, other) = (Folder::new("empty"), Folder::new("other"));
        let error = find(None, &[&none.0, &other.0]).expect_err("nowhere");
        let text = error.to_string();
        for part in [
            "libdevice.10.bc",
            &*none.0.to_string_lossy(),
            &*other.0.to_string_lossy(),
            "nvidia-cuda-nvcc-cu12",
            "CUDA_PATH",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn a_variable_that_hides_a_good_toolkit_is_blamed() {
        let (named, good) = (Folder::new("named"), Folder::new("good").with_libdevice());
        let error = find(Some(&named.0), &[&good.0]).expect_err("CubeCL looks there only");
        let NcclError::LibdeviceMissing { hidden, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(hidden.as_deref(), Some(&*good.0.join(FILE)));
        assert!(error.to_string().contains("unset CUDA_PATH"), "{error}");
    }
}
