//! The driver, its devices, and the libraries that training on them loads.

use std::ffi::{c_char, c_int, c_uint};

use libloading::{Library, Symbol};

use super::Finding;
use crate::{
    error::{CudaVersion, NcclError},
    libdevice::find_libdevice,
    library::Nccl,
};

pub(super) fn findings() -> Vec<Finding> {
    let mut findings = driver();
    findings.push(match find_libdevice() {
        Ok(path) => Finding::good("libdevice", path.display().to_string()),
        Err(error) => Finding::lack(
            "libdevice",
            "not found",
            format!("kernels with exp, log, tanh or erf do not compile on CUDA: {error}"),
        ),
    });
    findings.push(match Nccl::open() {
        Ok(nccl) => Finding::good(
            "NCCL",
            format!("{} ({})", nccl.version(), nccl.path().display()),
        ),
        Err(error) => Finding::lack(
            "NCCL",
            "not usable",
            format!("collectives of GPUs go through host memory and TCP: {error}"),
        ),
    });
    findings
}

fn driver() -> Vec<Finding> {
    const WHAT: &str = "driver";
    let lack = |found: &str, error: String| {
        let lack = format!("no training on GPUs of NVIDIA: {error}");
        vec![Finding::lack(WHAT, found, lack)]
    };
    let driver = match Driver::open() {
        Ok(driver) => driver,
        Err(error) => return lack("not found", error.to_string()),
    };
    let version = driver.version();
    if version < CudaVersion::MINIMUM {
        let error = NcclError::DriverTooOld { found: version };
        return lack(&format!("for CUDA {version}"), error.to_string());
    }
    let mut findings = vec![Finding::good(WHAT, format!("for CUDA {version}"))];
    let devices = match driver.devices() {
        Ok(devices) => devices,
        Err(code) => {
            let text = format!(
                "the driver finds no device and says {code} (is CUDA_VISIBLE_DEVICES right? In a container: `--gpus all`)"
            );
            findings.push(Finding::lack("devices", "none", text));
            return findings;
        }
    };
    for (index, &device) in devices.iter().enumerate() {
        let found = driver.describe(index, device);
        findings.push(if driver.attribute(device, MEMORY_POOLS) == 1 {
            Finding::good("device", found)
        } else {
            let error = NcclError::NoMemoryPools { device: index };
            Finding::lack("device", found, error.to_string())
        });
    }
    if devices.len() > 1 {
        findings.push(peers(&driver, &devices));
    }
    findings
}

/// Which pairs of devices reach each other's memory.
fn peers(driver: &Driver, devices: &[c_int]) -> Finding {
    let pairs = || {
        let each = devices.iter().enumerate();
        each.flat_map(|(a, first)| {
            let others = devices.iter().enumerate();
            others.filter_map(move |(b, second)| (a != b).then_some((a, b, *first, *second)))
        })
    };
    let apart: Vec<String> = pairs()
        .filter(|&(.., first, second)| !driver.reaches(first, second))
        .map(|(a, b, ..)| format!("{a}-{b}"))
        .collect();
    if apart.is_empty() {
        return Finding::good("peer access", "between all devices");
    }
    Finding::lack(
        "peer access",
        format!("not between {}", apart.join(", ")),
        "NCCL copies between these through host memory (see `nvidia-smi topo -m`; IOMMU and ACS settings can forbid it)",
    )
}

/// A value of the driver's `CUdevice_attribute`, as are the next two.
const MEMORY_POOLS: c_int = 115;
const MAJOR: c_int = 75;
const MINOR: c_int = 76;
const SUCCESS: c_int = 0;

/// A few functions of `libcuda.so.1`.
struct Driver {
    loaded: Library,
}

impl Driver {
    fn open() -> Result<Self, NcclError> {
        // SAFETY: what has this name is NVIDIA's driver.
        let library = unsafe { Library::new("libcuda.so.1") };
        let loaded = library.map_err(|_| NcclError::DriverMissing {
            search: crate::library::search_path(),
        })?;
        Ok(Self { loaded })
    }

    /// The function of that name, if the driver has it.
    ///
    /// # Safety
    ///
    /// `F` is its type in the driver's header.
    unsafe fn function<F>(&self, name: &str) -> Option<Symbol<'_, F>> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.loaded.get(name) }.ok()
    }

    fn version(&self) -> CudaVersion {
        let mut version = 0;
        // SAFETY: the header's type.
        let get = unsafe {
            self.function::<unsafe extern "C" fn(*mut c_int) -> c_int>("cuDriverGetVersion")
        };
        if let Some(get) = get {
            // SAFETY: writes one `int`, or fails and leaves 0.
            let _code = unsafe { get(&raw mut version) };
        }
        CudaVersion(version)
    }

    /// Handles of all devices, or the driver's code if there are none.
    fn devices(&self) -> Result<Vec<c_int>, c_int> {
        const MISSING: c_int = -1;
        // SAFETY: the header's types, here and below.
        let init = unsafe { self.function::<unsafe extern "C" fn(c_uint) -> c_int>("cuInit") };
        // SAFETY: as above.
        let count = unsafe {
            self.function::<unsafe extern "C" fn(*mut c_int) -> c_int>("cuDeviceGetCount")
        };
        // SAFETY: as above.
        let get = unsafe {
            self.function::<unsafe extern "C" fn(*mut c_int, c_int) -> c_int>("cuDeviceGet")
        };
        let (Some(init), Some(count), Some(get)) = (init, count, get) else {
            return Err(MISSING);
        };
        // SAFETY: takes flags, of which there are none.
        let code = unsafe { init(0) };
        if code != SUCCESS {
            return Err(code);
        }
        let mut devices = 0;
        // SAFETY: writes one `int`.
        let code = unsafe { count(&raw mut devices) };
        if code != SUCCESS || devices == 0 {
            return Err(code);
        }
        let handle = |index| {
            let mut device = 0;
            // SAFETY: writes one `int`.
            let code = unsafe { get(&raw mut device, index) };
            if code == SUCCESS {
                Ok(device)
            } else {
                Err(code)
            }
        };
        (0..devices).map(handle).collect()
    }

    fn describe(&self, index: usize, device: c_int) -> String {
        let mut name: [c_char; 128] = [0; 128];
        let mut bytes = 0usize;
        // SAFETY: the header's types, here and below.
        let get_name = unsafe {
            self.function::<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int>(
                "cuDeviceGetName",
            )
        };
        if let Some(get_name) = get_name {
            // SAFETY: writes at most 127 characters and an end, of which there is one in any case.
            let _code = unsafe { get_name(name.as_mut_ptr(), 127, device) };
        }
        // SAFETY: as above.
        let total = unsafe {
            self.function::<unsafe extern "C" fn(*mut usize, c_int) -> c_int>("cuDeviceTotalMem_v2")
        };
        if let Some(total) = total {
            // SAFETY: writes one `size_t`.
            let _code = unsafe { total(&raw mut bytes, device) };
        }
        // SAFETY: ended by a zero, see above.
        let name = unsafe { std::ffi::CStr::from_ptr(name.as_ptr()) };
        format!(
            "{index}: {}, {} GiB, compute capability {}.{}",
            name.to_string_lossy(),
            bytes >> 30,
            self.attribute(device, MAJOR),
            self.attribute(device, MINOR),
        )
    }

    /// 0 if it is not known.
    fn attribute(&self, device: c_int, attribute: c_int) -> c_int {
        let mut value = 0;
        // SAFETY: the header's type.
        let get = unsafe {
            self.function::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>(
                "cuDeviceGetAttribute",
            )
        };
        if let Some(get) = get {
            // SAFETY: writes one `int`.
            let _code = unsafe { get(&raw mut value, attribute, device) };
        }
        value
    }

    fn reaches(&self, device: c_int, peer: c_int) -> bool {
        let mut value = 0;
        // SAFETY: the header's type.
        let can = unsafe {
            self.function::<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>(
                "cuDeviceCanAccessPeer",
            )
        };
        // SAFETY: writes one `int`.
        can.is_some_and(|can| unsafe { can(&raw mut value, device, peer) } == SUCCESS) && value == 1
    }
}
