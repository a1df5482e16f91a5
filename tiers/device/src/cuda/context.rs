//! Which context a call runs in.
//!
//! Invariant: a call leaves the thread's current context and its capture mode as it found them. Contexts are the
//! primary ones, retained when first used and never given back: a process may end with work under way.

use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::Cuda;
use crate::{DeviceId, DriverError, Result, Stream, Verb};

/// One device's primary context.
#[derive(Debug, Default)]
pub(super) struct Context {
    /// The `CUcontext`, once retained.
    raw: OnceLock<usize>,
    /// A stream of ours for copies that the host waits for.
    own: OnceLock<Stream>,
    /// Taken while either is being made.
    making: Mutex<()>,
}

/// While it lives, the thread is in some context, and under relaxed capture mode where that was asked for.
pub(super) struct Entered<'a> {
    cuda: &'a Cuda,
    pushed: bool,
    /// The capture mode before.
    relaxed: Option<sys::CUstreamCaptureMode>,
}

impl Cuda {
    /// Enters a device's context.
    pub(super) fn enter(&self, device: DeviceId, verb: Verb) -> Result<Entered<'_>> {
        let entered = self.relax(verb)?;
        self.switch(entered, device, verb)
    }

    /// Enters a device's context for what no capture mode forbids, which is cheaper.
    pub(super) fn enter_as_is(&self, device: DeviceId, verb: Verb) -> Result<Entered<'_>> {
        self.switch(Entered { cuda: self, pushed: false, relaxed: None }, device, verb)
    }

    fn switch<'a>(&'a self, mut entered: Entered<'a>, device: DeviceId, verb: Verb) -> Result<Entered<'a>> {
        let context = self.context(device, verb)?;
        if self.current(verb)? != context {
            // SAFETY: a retained context.
            unsafe { self.api.cuCtxPushCurrent_v2(context) }.of(verb)?;
            entered.pushed = true;
        }
        Ok(entered)
    }

    /// For calls that need a context, and any will do: stays in the current one, else takes one that was used
    /// before, and the first device's only if there is none.
    pub(super) fn enter_any(&self, verb: Verb) -> Result<Entered<'_>> {
        let entered = self.relax(verb)?;
        if !self.current(verb)?.is_null() {
            return Ok(entered);
        }
        let used = self.contexts.iter().position(|context| context.raw.get().is_some());
        let device = used.and_then(|i| u32::try_from(i).ok()).unwrap_or(0);
        self.enter(DeviceId(device), verb)
    }

    /// For calls that need no context.
    pub(super) fn relax(&self, verb: Verb) -> Result<Entered<'_>> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: an out-parameter of this frame.
        unsafe { self.api.cuThreadExchangeStreamCaptureMode(&mut mode) }.of(verb)?;
        Ok(Entered { cuda: self, pushed: false, relaxed: Some(mode) })
    }

    /// A device's context, retained if it is not yet.
    pub(super) fn context(&self, device: DeviceId, verb: Verb) -> Result<sys::CUcontext> {
        let slot = self.slot(device)?;
        if let Some(raw) = slot.raw.get() {
            return Ok(*raw as sys::CUcontext);
        }
        let _making = slot.making.lock();
        if let Some(raw) = slot.raw.get() {
            return Ok(*raw as sys::CUcontext);
        }
        let handle = self.device(device, verb)?;
        let mut context = null_mut();
        // SAFETY: an out-parameter of this frame and a device that exists.
        unsafe { self.api.cuDevicePrimaryCtxRetain(&mut context, handle) }.of(verb)?;
        Ok(*slot.raw.get_or_init(|| context as usize) as sys::CUcontext)
    }

    /// Whether a device has its context, by whomever it was made. Makes none.
    pub(super) fn has_context(&self, device: DeviceId, verb: Verb) -> Result<bool> {
        if self.slot(device)?.raw.get().is_some() {
            return Ok(true);
        }
        let handle = self.device(device, verb)?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: out-parameters of this frame and a device that exists.
        unsafe { self.api.cuDevicePrimaryCtxGetState(handle, &mut flags, &mut active) }.of(verb)?;
        Ok(active != 0)
    }

    /// The stream for copies that the host waits for: it neither waits for nor delays the caller's streams. To be
    /// called inside the device's context.
    pub(super) fn own_stream(&self, device: DeviceId, verb: Verb) -> Result<Stream> {
        let slot = self.slot(device)?;
        if let Some(stream) = slot.own.get() {
            return Ok(*stream);
        }
        let _making = slot.making.lock();
        if let Some(stream) = slot.own.get() {
            return Ok(*stream);
        }
        let stream = super::stream::create_here(self, verb)?;
        Ok(*slot.own.get_or_init(|| stream))
    }

    /// CUDA's name for a device.
    pub(super) fn device(&self, device: DeviceId, verb: Verb) -> Result<sys::CUdevice> {
        self.slot(device)?;
        let ordinal = i32::try_from(device.0).map_err(|_| self.no_such(device))?;
        let mut handle = 0;
        // SAFETY: an out-parameter of this frame.
        unsafe { self.api.cuDeviceGet(&mut handle, ordinal) }.of(verb)?;
        Ok(handle)
    }

    /// Whose context it is: mostly one of ours.
    pub(super) fn device_of(&self, context: sys::CUcontext, verb: Verb) -> Result<DeviceId> {
        let known = self.contexts.iter().position(|slot| slot.raw.get() == Some(&(context as usize)));
        if let Some(index) = known.and_then(|index| u32::try_from(index).ok()) {
            return Ok(DeviceId(index));
        }
        let mut device = 0;
        // SAFETY: a context that a stream has.
        unsafe { self.api.cuCtxPushCurrent_v2(context) }.of(verb)?;
        // SAFETY: an out-parameter of this frame.
        let asked = unsafe { self.api.cuCtxGetDevice(&mut device) }.of(verb);
        let mut popped = null_mut();
        // SAFETY: an out-parameter of this frame; what is popped was pushed above.
        unsafe { self.api.cuCtxPopCurrent_v2(&mut popped) }.of(verb)?;
        asked?;
        let count = u32::try_from(self.contexts.len()).unwrap_or(u32::MAX);
        let same = |id: &DeviceId| self.device(*id, verb).is_ok_and(|handle| handle == device);
        let found = (0..count).map(DeviceId).find(same);
        found.ok_or(DriverError::NoSuchDevice { device: DeviceId(count), count })
    }

    fn slot(&self, device: DeviceId) -> Result<&Context> {
        let index = usize::try_from(device.0).ok();
        index.and_then(|i| self.contexts.get(i)).ok_or_else(|| self.no_such(device))
    }

    fn no_such(&self, device: DeviceId) -> DriverError {
        let count = u32::try_from(self.contexts.len()).unwrap_or(u32::MAX);
        DriverError::NoSuchDevice { device, count }
    }

    pub(super) fn current(&self, verb: Verb) -> Result<sys::CUcontext> {
        let mut current = null_mut();
        // SAFETY: an out-parameter of this frame.
        unsafe { self.api.cuCtxGetCurrent(&mut current) }.of(verb)?;
        Ok(current)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = null_mut();
            // SAFETY: an out-parameter of this frame; what is popped was pushed by this value. If it fails, the
            // process is past using CUDA.
            let _ = unsafe { self.cuda.api.cuCtxPopCurrent_v2(&mut popped) };
        }
        if let Some(mut mode) = self.relaxed {
            // SAFETY: as above.
            let _ = unsafe { self.cuda.api.cuThreadExchangeStreamCaptureMode(&mut mode) };
        }
    }
}
