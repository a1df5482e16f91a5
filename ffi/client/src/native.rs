//! `libcuda.so.1` as any program has it: what the library's copies are measured against, without the library in between.

use std::ffi::{c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::null_mut;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{LoadError, Part, Result, Stream};

const FILE: &str = "libcuda.so.1";

macro_rules! calls {
    ($($name:ident = $symbol:literal($($argument:ty),*);)*) => {
        #[derive(Debug)]
        struct Calls {
            $($name: unsafe extern "C" fn($($argument),*) -> c_uint,)*
        }

        impl Calls {
            fn of(library: &Library) -> std::result::Result<Self, libloading::Error> {
                Ok(Calls {
                    // SAFETY: these are the driver's documented signatures, the same since CUDA 4, or 11.2.
                    $($name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,)*
                })
            }
        }
    };
}

calls! {
    initialise = "cuInit"(c_uint);
    device = "cuDeviceGet"(*mut c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain"(*mut *mut c_void, c_int);
    set_current = "cuCtxSetCurrent"(*mut c_void);
    allocate = "cuMemAlloc_v2"(*mut u64, usize);
    allocate_async = "cuMemAllocAsync"(*mut u64, usize, *mut c_void);
    free = "cuMemFree_v2"(u64);
    copy = "cuMemcpyAsync"(u64, u64, usize, *mut c_void);
    synchronize = "cuStreamSynchronize"(*mut c_void);
}

/// Who makes memory that is not the library's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaAllocator {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemAllocAsync`, of the device's default pool.
    Mempool,
}

/// The driver, with the primary contexts of so many devices.
#[derive(Debug)]
pub struct Libcuda {
    calls: Calls,
    contexts: Vec<usize>,
    _library: Library,
}

impl Libcuda {
    /// Opens the driver for the first devices.
    ///
    /// # Errors
    /// [`LoadError::Load`], [`LoadError::Driver`].
    pub fn open(devices: u32) -> Result<Libcuda> {
        let failed = |source| LoadError::Load { path: Path::new(FILE).to_owned(), source };
        // SAFETY: the driver's own library, which the other one has loaded already.
        let library = unsafe { Library::open(Some(FILE), RTLD_NOW | RTLD_LOCAL) }.map_err(failed)?;
        let calls = Calls::of(&library).map_err(failed)?;
        // SAFETY: the flags must be zero, and are.
        done("cuInit", unsafe { (calls.initialise)(0) })?;
        let mut contexts = Vec::new();
        for ordinal in 0..devices {
            let (mut device, mut context) = (0, null_mut());
            let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
            // SAFETY: an out-parameter of this frame.
            done("cuDeviceGet", unsafe { (calls.device)(&mut device, ordinal) })?;
            // SAFETY: as above, and a device that exists.
            done("cuDevicePrimaryCtxRetain", unsafe { (calls.retain)(&mut context, device) })?;
            contexts.push(context.expose_provenance());
        }
        Ok(Libcuda { calls, contexts, _library: library })
    }

    /// Makes a device current for the calling thread.
    pub(crate) fn enter(&self, device: u32) -> Result<()> {
        let context = self.contexts.get(device as usize).copied().unwrap_or(0);
        // SAFETY: a retained context, or none.
        done("cuCtxSetCurrent", unsafe {
            (self.calls.set_current)(std::ptr::with_exposed_provenance_mut(context))
        })
    }

    pub(crate) fn allocate(&self, device: u32, size: usize, by: CudaAllocator) -> Result<usize> {
        self.enter(device)?;
        let mut address = 0;
        match by {
            // SAFETY: an out-parameter of this frame.
            CudaAllocator::Plain => done("cuMemAlloc", unsafe { (self.calls.allocate)(&mut address, size) })?,
            CudaAllocator::Mempool => {
                // SAFETY: as above; the default stream is waited for, so that every other one may use it.
                done("cuMemAllocAsync", unsafe {
                    (self.calls.allocate_async)(&mut address, size, null_mut())
                })?;
                self.synchronize(Stream(0))?;
            }
        }
        Ok(usize::try_from(address).unwrap_or(0))
    }

    /// Gives memory of `allocate` back, which waits for all work.
    pub(crate) fn release(&self, device: u32, address: usize) {
        if self.enter(device).is_ok() {
            // SAFETY: allocated here, and given back once. What fails leaves it to the end of the process.
            unsafe { (self.calls.free)(address as u64) };
        }
    }

    /// Enqueues a copy. The device is current.
    ///
    /// # Safety
    /// Both parts live until the copy has run.
    pub(crate) unsafe fn copy(&self, to: Part<'_>, from: Part<'_>, stream: Stream) -> Result<()> {
        let (size, stream) = (to.size.min(from.size), stream.0 as *mut c_void);
        // SAFETY: the caller's promise; a stream of the library's lives as long as it.
        done("cuMemcpyAsync", unsafe {
            (self.calls.copy)(to.address as u64, from.address as u64, size, stream)
        })
    }

    pub(crate) fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: a stream of the library's.
        done("cuStreamSynchronize", unsafe { (self.calls.synchronize)(stream.0 as *mut c_void) })
    }
}

fn done(call: &'static str, code: c_uint) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(LoadError::Driver { call, code }) }
}
