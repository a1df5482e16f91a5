//! Function pointers into libcuda, resolved by name when the driver is opened, and CUDA's error codes.
//!
//! Library, types and signatures come from cudarc (a signature that differs does not compile), but the calls do not: a call that the
//! installed driver lacks returns [`Code::MISSING`] instead of panicking, and results are plain numbers, so that a code newer than the
//! bindings is not undefined behaviour. An error code becomes a [`DriverError`] by what the caller can do about it.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys;
use glake_units::Bytes;

use crate::{Address, DriverError, Refusal, Result, Verb};

macro_rules! api {
    ($($name:ident($($arg:ident: $ty:ty),* $(,)?);)+) => {
        /// Function pointers; `None` for calls that the driver lacks.
        #[allow(non_snake_case)]
        pub(super) struct Api {
            $($name: Option<unsafe extern "C" fn($($ty),*) -> c_uint>),+
        }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Api {
            /// # Safety
            /// libcuda must be loadable: otherwise cudarc panics.
            unsafe fn find() -> Api {
                Api {
                    $($name: {
                        const _: unsafe fn($($ty),*) -> sys::CUresult = sys::$name;
                        // SAFETY: the caller has seen that the library is there; the name means this signature.
                        unsafe { sys::culib().get(concat!(stringify!($name), "\0").as_bytes()) }
                            .ok()
                            .map(|symbol| *symbol)
                    }),+
                }
            }

            $(
                /// # Safety
                /// As CUDA's documentation of this call demands.
                pub(super) unsafe fn $name(&self, $($arg: $ty),*) -> Code {
                    match self.$name {
                        // SAFETY: the caller's promise.
                        Some(function) => Code(unsafe { function($($arg),*) }),
                        None => Code::MISSING,
                    }
                }
            )+
        }
    };
}

api! {
    cuInit(flags: c_uint);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: sys::CUdevice);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
    cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: sys::CUdevice);
    cuDevicePrimaryCtxGetState(device: sys::CUdevice, flags: *mut c_uint, active: *mut c_int);
    cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
    cuCtxCreate_v4(
        context: *mut sys::CUcontext,
        parameters: *mut sys::CUctxCreateParams,
        flags: c_uint,
        device: sys::CUdevice,
    );
    cuCtxDestroy_v2(context: sys::CUcontext);
    cuCtxGetCurrent(context: *mut sys::CUcontext);
    cuCtxPushCurrent_v2(context: sys::CUcontext);
    cuCtxPopCurrent_v2(context: *mut sys::CUcontext);
    cuCtxSynchronize();
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    cuCtxRecordEvent(context: sys::CUcontext, event: sys::CUevent);
    cuDeviceCanAccessPeer(can: *mut c_int, device: sys::CUdevice, peer: sys::CUdevice);
    cuCtxEnablePeerAccess(peer: sys::CUcontext, flags: c_uint);
    cuStreamGetCtx(stream: sys::CUstream, context: *mut sys::CUcontext);
    cuCtxGetDevice(device: *mut sys::CUdevice);
    cuThreadExchangeStreamCaptureMode(mode: *mut sys::CUstreamCaptureMode);

    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemGetAllocationGranularity(
        granularity: *mut usize,
        properties: *const sys::CUmemAllocationProp,
        option: sys::CUmemAllocationGranularity_flags,
    );
    cuMemAddressReserve(
        start: *mut sys::CUdeviceptr,
        size: usize,
        alignment: usize,
        hint: sys::CUdeviceptr,
        flags: c_ulonglong,
    );
    cuMemAddressFree(start: sys::CUdeviceptr, size: usize);
    cuMemCreate(
        handle: *mut sys::CUmemGenericAllocationHandle,
        size: usize,
        properties: *const sys::CUmemAllocationProp,
        flags: c_ulonglong,
    );
    cuMemRelease(handle: sys::CUmemGenericAllocationHandle);
    cuMemMap(
        start: sys::CUdeviceptr,
        size: usize,
        offset: usize,
        handle: sys::CUmemGenericAllocationHandle,
        flags: c_ulonglong,
    );
    cuMemUnmap(start: sys::CUdeviceptr, size: usize);
    cuMemAlloc_v2(start: *mut sys::CUdeviceptr, size: usize);
    cuMemFree_v2(start: sys::CUdeviceptr);
    cuMemSetAccess(
        start: sys::CUdeviceptr,
        size: usize,
        access: *const sys::CUmemAccessDesc,
        count: usize,
    );
    cuMemExportToShareableHandle(
        shared: *mut c_void,
        handle: sys::CUmemGenericAllocationHandle,
        kind: sys::CUmemAllocationHandleType,
        flags: c_ulonglong,
    );
    cuMemImportFromShareableHandle(
        handle: *mut sys::CUmemGenericAllocationHandle,
        shared: *mut c_void,
        kind: sys::CUmemAllocationHandleType,
    );
    cuMemRetainAllocationHandle(handle: *mut sys::CUmemGenericAllocationHandle, address: *mut c_void);
    cuPointerGetAttributes(
        count: c_uint,
        attributes: *mut sys::CUpointer_attribute,
        values: *mut *mut c_void,
        address: sys::CUdeviceptr,
    );
    cuMemHostRegister_v2(start: *mut c_void, size: usize, flags: c_uint);
    cuMemHostUnregister(start: *mut c_void);

    cuMemcpyAsync(to: sys::CUdeviceptr, from: sys::CUdeviceptr, size: usize, stream: sys::CUstream);
    cuMemcpyPeerAsync(
        to: sys::CUdeviceptr,
        to_context: sys::CUcontext,
        from: sys::CUdeviceptr,
        from_context: sys::CUcontext,
        size: usize,
        stream: sys::CUstream,
    );
    cuMemcpyBatchAsync_v2(
        to: *mut sys::CUdeviceptr,
        from: *mut sys::CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        attributes: *mut sys::CUmemcpyAttributes,
        first: *mut usize,
        attribute_count: usize,
        stream: sys::CUstream,
    );
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: sys::CUdeviceptr, size: usize, stream: sys::CUstream);
    cuMemcpyHtoDAsync_v2(to: sys::CUdeviceptr, from: *const c_void, size: usize, stream: sys::CUstream);
    cuMemsetD8Async(start: sys::CUdeviceptr, byte: c_uchar, size: usize, stream: sys::CUstream);

    cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
    cuStreamCreateWithPriority(stream: *mut sys::CUstream, flags: c_uint, priority: c_int);
    cuStreamDestroy_v2(stream: sys::CUstream);
    cuStreamGetId(stream: sys::CUstream, id: *mut c_ulonglong);
    cuStreamSynchronize(stream: sys::CUstream);
    cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    cuStreamWaitValue32_v2(stream: sys::CUstream, address: sys::CUdeviceptr, value: u32, flags: c_uint);
    cuStreamWriteValue32_v2(stream: sys::CUstream, address: sys::CUdeviceptr, value: u32, flags: c_uint);
    cuStreamIsCapturing(stream: sys::CUstream, status: *mut sys::CUstreamCaptureStatus);
    cuStreamGetCaptureInfo_v3(
        stream: sys::CUstream,
        status: *mut sys::CUstreamCaptureStatus,
        id: *mut sys::cuuint64_t,
        graph: *mut sys::CUgraph,
        dependencies: *mut *const sys::CUgraphNode,
        edges: *mut *const sys::CUgraphEdgeData,
        count: *mut usize,
    );

    cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    cuEventDestroy_v2(event: sys::CUevent);
    cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    cuEventQuery(event: sys::CUevent);
    cuEventSynchronize(event: sys::CUevent);
    cuEventElapsedTime_v2(milliseconds: *mut f32, from: sys::CUevent, to: sys::CUevent);

    cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
    cuModuleUnload(module: sys::CUmodule);
    cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    cuLaunchKernel(
        function: sys::CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: sys::CUstream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
}

impl Api {
    /// Resolves the calls. Returns `None` if libcuda cannot be loaded.
    pub(super) fn open() -> Option<Api> {
        // SAFETY: loading the NVIDIA driver's library runs its initialisers, as intended.
        if !unsafe { sys::is_culib_present() } {
            return None;
        }
        // SAFETY: the library is there.
        Some(unsafe { Api::find() })
    }
}

/// CUDA's `CUresult` as a plain number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(pub(super) u32);

impl Code {
    /// Code for a call that the driver lacks.
    pub(super) const MISSING: Code = Code(u32::MAX);
    pub(super) const INVALID_VALUE: Code = Code(1);
    pub(super) const STUB_LIBRARY: Code = Code(34);
    pub(super) const NO_DEVICE: Code = Code(100);
    pub(super) const NOT_READY: Code = Code(600);
    pub(super) const PEER_ACCESS_ALREADY_ENABLED: Code = Code(704);

    /// Returns the error of a call that has neither an address nor a size.
    pub(super) fn of(self, verb: Verb) -> Result<()> {
        self.at(verb, Address(0), Bytes::ZERO)
    }

    /// Returns the error of a call for `size` bytes at `address`.
    pub(super) fn at(self, verb: Verb, address: Address, size: Bytes) -> Result<()> {
        let refused = |reason| Err(DriverError::Refused { verb, address, reason });
        match self.0 {
            0 => Ok(()),
            1 => refused(Refusal::InvalidValue),
            101 => refused(Refusal::UnknownDevice),
            201 => refused(Refusal::UnknownContext),
            2 => Err(DriverError::OutOfMemory { verb, wanted: size }),
            // The call needs a newer driver, or is not supported.
            code @ (36 | 217 | 801) => Err(DriverError::Unsupported { verb, code }),
            u32::MAX => Err(DriverError::Unsupported { verb, code: DriverError::UNSUPPORTED }),
            208 if verb != Verb::HostRegister => refused(Refusal::AlreadyMapped),
            211 => refused(Refusal::NotMapped),
            400 => refused(Refusal::UnknownHandle),
            500 => refused(Refusal::NotFound),
            600 => Err(DriverError::NotReady { verb }),
            705 => refused(Refusal::NoPeerAccess),
            712 if verb == Verb::HostRegister => refused(Refusal::AlreadyMapped),
            713 => refused(Refusal::NotRegistered),
            907 => refused(Refusal::CapturedEvent),
            code @ (900..=906 | 908) => Err(DriverError::Capturing { verb, code }),
            // Deinitialised; uncorrectable ECC and NVLink errors, and contained ones; illegal address, launch
            // timeout, destroyed context, assert; stack error, illegal instruction, misaligned address, address
            // space, program counter, launch failure; leaked tensor memory; external device.
            code @ (4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 911) => {
                Err(DriverError::Sticky { verb, code })
            }
            code => Err(DriverError::of_number(verb, code)),
        }
    }
}

#[cfg(test)]
mod code_tests {
    use super::*;

    #[test]
    fn codes_map_to_what_a_caller_can_do() {
        let of = |code| Code(code).at(Verb::Create, Address(7), Bytes::mib(2));
        assert!(of(0).is_ok());
        assert!(
            matches!(of(1), Err(DriverError::Refused { address: Address(7), reason, .. }) if reason == Refusal::InvalidValue)
        );
        assert!(matches!(of(2), Err(DriverError::OutOfMemory { wanted, .. }) if wanted == Bytes::mib(2)));
        assert!(matches!(of(600), Err(DriverError::NotReady { .. })));
        assert!(matches!(of(900), Err(DriverError::Capturing { .. })));
        assert!(matches!(of(700), Err(DriverError::Sticky { code: 700, .. })));
        assert!(matches!(of(719), Err(DriverError::Sticky { code: 719, .. })));
        assert!(matches!(of(12345), Err(DriverError::Failed { code: 12345, .. })));
        assert!(matches!(
            Code::MISSING.of(Verb::Copy),
            Err(DriverError::Unsupported { verb: Verb::Copy, .. })
        ));
    }

    #[test]
    fn the_driver_number_is_kept() {
        for verb in [Verb::Copy, Verb::Map, Verb::HostRegister, Verb::PointerAttributes] {
            for number in 1..=1000 {
                let error = Code(number).at(verb, Address(7), Bytes::mib(2)).unwrap_err();
                assert_eq!(error.code(), Some(number), "{verb}: {error}");
            }
        }
        assert_eq!(Code::MISSING.of(Verb::Copy).unwrap_err().code(), Some(801));
    }
}
