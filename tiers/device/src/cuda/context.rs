//! Selection and lifetime of the context that each call runs in.
//!
//! Invariants:
//! - A call leaves the thread's current context and its capture mode as it found them.
//! - Contexts are the primary ones, retained at first use, or private ones, created at first use. A context is released only on request and
//!   while no object created here is alive in it: a process may exit with work in flight.
//! - No call loses its context while it runs. If the context was already current, the program holds it. A call that pushed the context
//!   holds `calls` for reading until the pop; a release takes `calls` for writing, without waiting for it.

use std::collections::HashMap;
use std::hash::Hash;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cudarc::driver::sys;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::{ContextKind, Cuda, stream};
use crate::{DeviceId, DriverError, Living, Result, Stream, Verb};

/// Context state of one device.
#[derive(Debug, Default)]
pub(super) struct Context {
    /// Retained `CUcontext`; 0 if none is retained.
    raw: AtomicUsize,
    /// Number of contexts retained before this one.
    since: AtomicU64,
    /// Private stream for copies that the host waits for; 0 if not created yet.
    own: AtomicU64,
    /// Lock held while the context or the private stream is created.
    making: Mutex<()>,
    calls: RwLock<()>,
    /// Counts of objects created in the context.
    pub(super) alive: Alive,
}

/// Guard that keeps a context current, and relaxed capture mode if requested, until dropped.
pub(super) struct CurrentContext<'a> {
    cuda: &'a Cuda,
    pushed: bool,
    /// Capture mode to restore.
    relaxed: Option<sys::CUstreamCaptureMode>,
    /// Keeps the context from being released.
    _hold: Option<ContextHold<'a>>,
}

/// Guard that keeps a retained context from being released.
pub(super) type ContextHold<'a> = RwLockReadGuard<'a, ()>;

impl Cuda {
    /// Makes a device's context current.
    pub(super) fn make_current(&self, device: DeviceId, verb: Verb) -> Result<CurrentContext<'_>> {
        let guard = self.relax(verb)?;
        self.switch(guard, device, verb)
    }

    /// Makes a device's context current for calls that every capture mode allows; cheaper than [`Cuda::make_current`].
    pub(super) fn make_current_as_is(&self, device: DeviceId, verb: Verb) -> Result<CurrentContext<'_>> {
        self.switch(CurrentContext { cuda: self, pushed: false, relaxed: None, _hold: None }, device, verb)
    }

    /// Makes a context current for recording on a stream or waiting in it. Every capture mode allows both, and they run in the stream's own
    /// context whichever is current, except for default streams, which each context has its own of. A live stream keeps its context alive.
    pub(super) fn make_current_for(
        &self,
        device: DeviceId,
        stream: Stream,
        verb: Verb,
    ) -> Result<CurrentContext<'_>> {
        if stream::is_default(stream) || self.current(verb)?.is_null() {
            return self.make_current(device, verb);
        }
        Ok(CurrentContext { cuda: self, pushed: false, relaxed: None, _hold: None })
    }

    /// Makes a device's context current if it exists, whoever created it. Never creates one.
    pub(super) fn make_current_if_made(
        &self,
        device: DeviceId,
        verb: Verb,
    ) -> Result<Option<CurrentContext<'_>>> {
        // The context cannot be released between the query and the entry, which retains it once more.
        let _hold = self.slot(device)?.calls.read_recursive();
        if self.has_context(device, verb)? { self.make_current(device, verb).map(Some) } else { Ok(None) }
    }

    fn switch<'a>(
        &'a self,
        mut guard: CurrentContext<'a>,
        device: DeviceId,
        verb: Verb,
    ) -> Result<CurrentContext<'a>> {
        let current = self.current(verb)?;
        let retained = self.slot(device)?.raw.load(Ordering::Acquire);
        if retained != 0 && current as usize == retained {
            return Ok(guard);
        }
        let (context, kept) = self.keep(device, verb)?;
        if current != context {
            // SAFETY: a retained context, which is kept.
            unsafe { self.api.cuCtxPushCurrent_v2(context) }.of(verb)?;
            guard.pushed = true;
        }
        guard._hold = Some(kept);
        Ok(guard)
    }

    /// Makes some context current, for calls that work in any: the current one, else the one retained longest ago (the likeliest to stay),
    /// else the first device's.
    pub(super) fn make_any_current(&self, verb: Verb) -> Result<CurrentContext<'_>> {
        self.make_some_current(verb).map(|(guard, _)| guard)
    }

    /// Like [`Cuda::make_any_current`]; also returns the device of the context if it is one of ours.
    pub(super) fn make_some_current(&self, verb: Verb) -> Result<(CurrentContext<'_>, Option<DeviceId>)> {
        let guard = self.relax(verb)?;
        let current = self.current(verb)?;
        if !current.is_null() {
            let is = |slot: &&Context| slot.raw.load(Ordering::Acquire) == current as usize;
            let found = (0_u32..).map(DeviceId).zip(&self.contexts).find(|(_, slot)| is(slot));
            return Ok((guard, found.map(|(device, _)| device)));
        }
        drop(guard);
        let retained = |slot: &Context| slot.raw.load(Ordering::Acquire) != 0;
        // The context may be released in the meantime.
        for _ in &self.contexts {
            let used = (0_u32..).map(DeviceId).zip(&self.contexts).filter(|(_, slot)| retained(slot));
            let Some((device, _)) = used.min_by_key(|(_, slot)| slot.since.load(Ordering::Relaxed)) else {
                break;
            };
            if let Some(guard) = self.make_current_if_made(device, verb)? {
                return Ok((guard, Some(device)));
            }
        }
        Ok((self.make_current(DeviceId(0), verb)?, Some(DeviceId(0))))
    }

    /// Enters relaxed capture mode, for calls that need no context.
    pub(super) fn relax(&self, verb: Verb) -> Result<CurrentContext<'_>> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: an out-parameter of this frame.
        unsafe { self.api.cuThreadExchangeStreamCaptureMode(&mut mode) }.of(verb)?;
        Ok(CurrentContext { cuda: self, pushed: false, relaxed: Some(mode), _hold: None })
    }

    /// Returns a device's context, retained if necessary, and a guard that keeps it from being released.
    pub(super) fn keep(&self, device: DeviceId, verb: Verb) -> Result<(sys::CUcontext, ContextHold<'_>)> {
        let slot = self.slot(device)?;
        // A thread that already holds the lock, in an enclosing call, acquires it again.
        let kept = slot.calls.read_recursive();
        let retained = || match slot.raw.load(Ordering::Acquire) {
            0 => None,
            raw => Some(raw as sys::CUcontext),
        };
        if let Some(context) = retained() {
            return Ok((context, kept));
        }
        let _making = slot.making.lock();
        if let Some(context) = retained() {
            return Ok((context, kept));
        }
        let handle = self.device(device, verb)?;
        let mut context = null_mut();
        match self.kind {
            ContextKind::Primary => {
                // SAFETY: an out-parameter of this frame and a device that exists.
                unsafe { self.api.cuDevicePrimaryCtxRetain(&mut context, handle) }.of(verb)?
            }
            ContextKind::Own => {
                // SAFETY: as above; no parameters are given.
                unsafe { self.api.cuCtxCreate_v4(&mut context, null_mut(), 0, handle) }.of(verb)?;
                let mut popped = null_mut();
                // SAFETY: an out-parameter of this frame; making a context has pushed it.
                unsafe { self.api.cuCtxPopCurrent_v2(&mut popped) }.of(verb)?;
            }
        }
        slot.since.store(self.retained.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        slot.raw.store(context as usize, Ordering::Release);
        Ok((context, kept))
    }

    /// Releases a device's context if none of our objects lives in it and no call runs in it.
    pub(super) fn give_back(&self, device: DeviceId) -> Result<()> {
        let verb = Verb::ReleaseContext;
        let slot = self.slot(device)?;
        slot.alive.none(device)?;
        let Some(_alone) = slot.calls.try_write() else { return Err(DriverError::NotReady { verb }) };
        // The counts are up to date: every call that created an object has ended.
        slot.alive.none(device)?;
        let retained = slot.raw.load(Ordering::Acquire);
        if retained == 0 {
            return Ok(());
        }
        let handle = self.device(device, verb)?;
        {
            let mut guard = self.relax(verb)?;
            // SAFETY: a retained context that only this call can release now.
            unsafe { self.api.cuCtxPushCurrent_v2(retained as sys::CUcontext) }.of(verb)?;
            guard.pushed = true;
            // SAFETY: a call without parameters, in the context that was pushed.
            unsafe { self.api.cuCtxSynchronize() }.of(verb)?;
            let own = Stream(slot.own.load(Ordering::Acquire));
            if own.0 != 0 {
                // SAFETY: a private stream: its users hold the context, and there are none now.
                unsafe { self.api.cuStreamDestroy_v2(stream::raw(own)) }.of(verb)?;
                slot.own.store(0, Ordering::Release);
            }
        }
        match self.kind {
            // SAFETY: it was retained once, and not given back since.
            ContextKind::Primary => unsafe { self.api.cuDevicePrimaryCtxRelease_v2(handle) }.of(verb)?,
            // SAFETY: created here, without live objects of ours, and unknown to other code.
            ContextKind::Own => unsafe { self.api.cuCtxDestroy_v2(retained as sys::CUcontext) }.of(verb)?,
        }
        slot.raw.store(0, Ordering::Release);
        Ok(())
    }

    /// Returns whether a device's context exists, whoever created it. Never creates one.
    pub(super) fn has_context(&self, device: DeviceId, verb: Verb) -> Result<bool> {
        if self.slot(device)?.raw.load(Ordering::Acquire) != 0 {
            return Ok(true);
        }
        if self.kind == ContextKind::Own {
            return Ok(false);
        }
        let handle = self.device(device, verb)?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: out-parameters of this frame and a device that exists.
        unsafe { self.api.cuDevicePrimaryCtxGetState(handle, &mut flags, &mut active) }.of(verb)?;
        Ok(active != 0)
    }

    /// Returns the private stream for copies that the host waits for, valid while the guard lives. The stream neither waits for nor delays
    /// the caller's streams. The device's context must be current.
    pub(super) fn own_stream(&self, device: DeviceId, verb: Verb) -> Result<(Stream, ContextHold<'_>)> {
        let slot = self.slot(device)?;
        let kept = slot.calls.read_recursive();
        let made = || match slot.own.load(Ordering::Acquire) {
            0 => None,
            own => Some(Stream(own)),
        };
        if let Some(own) = made() {
            return Ok((own, kept));
        }
        let _making = slot.making.lock();
        if let Some(own) = made() {
            return Ok((own, kept));
        }
        let own = stream::create_here(self, verb)?;
        slot.own.store(own.0, Ordering::Release);
        Ok((own, kept))
    }

    /// Returns CUDA's handle of a device.
    pub(super) fn device(&self, device: DeviceId, verb: Verb) -> Result<sys::CUdevice> {
        self.slot(device)?;
        let ordinal = i32::try_from(device.0).map_err(|_| self.no_such(device))?;
        let mut handle = 0;
        // SAFETY: an out-parameter of this frame.
        unsafe { self.api.cuDeviceGet(&mut handle, ordinal) }.of(verb)?;
        Ok(handle)
    }

    /// Returns the device of a context, which is usually one of ours.
    pub(super) fn device_of(&self, context: sys::CUcontext, verb: Verb) -> Result<DeviceId> {
        let is = |slot: &Context| slot.raw.load(Ordering::Acquire) == context as usize;
        let known = self.contexts.iter().position(is);
        if let Some(index) = known.and_then(|index| u32::try_from(index).ok()) {
            return Ok(DeviceId(index));
        }
        let mut device = 0;
        // SAFETY: a context that a stream has.
        unsafe { self.api.cuCtxPushCurrent_v2(context) }.of(verb)?;
        // SAFETY: an out-parameter of this frame.
        let asked = unsafe { self.api.cuCtxGetDevice(&mut device) }.of(verb);
        let mut popped = null_mut();
        // SAFETY: an out-parameter of this frame; pops the context pushed above.
        unsafe { self.api.cuCtxPopCurrent_v2(&mut popped) }.of(verb)?;
        asked?;
        let count = u32::try_from(self.contexts.len()).unwrap_or(u32::MAX);
        let same = |id: &DeviceId| self.device(*id, verb).is_ok_and(|handle| handle == device);
        let found = (0..count).map(DeviceId).find(same);
        found.ok_or(DriverError::NoSuchDevice { device: DeviceId(count), count })
    }

    /// Returns the device whose primary context this is; `None` for any other context.
    pub(super) fn primary_device(&self, context: sys::CUcontext, verb: Verb) -> Result<Option<DeviceId>> {
        let device = self.device_of(context, verb)?;
        let retained = self.slot(device)?.raw.load(Ordering::Acquire);
        if retained != 0 || self.kind == ContextKind::Own {
            return Ok((retained == context as usize).then_some(device));
        }
        // A context that was never retained cannot be current.
        if !self.has_context(device, verb)? {
            return Ok(None);
        }
        let (primary, _hold) = self.keep(device, verb)?;
        Ok((primary == context).then_some(device))
    }

    pub(super) fn slot(&self, device: DeviceId) -> Result<&Context> {
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

impl Drop for CurrentContext<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = null_mut();
            // SAFETY: an out-parameter of this frame; pops the context pushed by this value. If it fails, the
            // process cannot use CUDA any more.
            let _ = unsafe { self.cuda.api.cuCtxPopCurrent_v2(&mut popped) };
        }
        if let Some(mut mode) = self.relaxed {
            // SAFETY: as above.
            let _ = unsafe { self.cuda.api.cuThreadExchangeStreamCaptureMode(&mut mode) };
        }
    }
}

/// Live objects of one context. A count changes inside the call that creates or destroys an object, after the driver has succeeded.
#[derive(Debug, Default)]
pub(super) struct Alive {
    pub(super) streams: Count,
    pub(super) events: Count,
    pub(super) modules: Count,
    pub(super) extents: Count,
    pub(super) registrations: Count,
}

#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

/// Device whose context each object was created in, for objects whose destroy call does not name it.
#[derive(Debug)]
pub(super) struct Owners<K>(Mutex<HashMap<K, DeviceId>>);

impl Alive {
    /// Returns `ContextInUse` if any object is alive.
    pub(super) fn none(&self, device: DeviceId) -> Result<()> {
        let living = Living {
            streams: self.streams.get(),
            events: self.events.get(),
            modules: self.modules.get(),
            extents: self.extents.get(),
            registrations: self.registrations.get(),
        };
        if living.is_none() { Ok(()) } else { Err(DriverError::ContextInUse { device, living }) }
    }
}

impl Count {
    pub(super) fn more(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn less(&self) {
        // Objects created by the program and destroyed here were never counted. The closure never returns `None`.
        let less = |count: u64| Some(count.saturating_sub(1));
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl<K: Eq + Hash> Owners<K> {
    pub(super) fn new() -> Owners<K> {
        Owners(Mutex::default())
    }

    pub(super) fn made(&self, what: K, device: DeviceId) {
        self.0.lock().insert(what, device);
    }

    pub(super) fn gone(&self, what: &K) -> Option<DeviceId> {
        self.0.lock().remove(what)
    }
}

#[cfg(test)]
mod alive_tests {
    use super::*;

    #[test]
    fn living_objects_are_listed() {
        let alive = Alive::default();
        alive.none(DeviceId(3)).unwrap();
        alive.streams.more();
        alive.streams.more();
        alive.extents.more();
        let refused = alive.none(DeviceId(3)).unwrap_err();
        assert!(refused.to_string().contains("2 streams, 1 extents"), "{refused}");
        (0..3).for_each(|_| alive.streams.less());
        alive.extents.less();
        alive.registrations.more();
        let refused = alive.none(DeviceId(3)).unwrap_err();
        assert!(refused.to_string().contains("1 ranges of pinned memory"), "{refused}");
        alive.registrations.less();
        let owners = Owners::new();
        owners.made(7, DeviceId(1));
        assert_eq!([owners.gone(&7), owners.gone(&7)], [Some(DeviceId(1)), None]);
        alive.none(DeviceId(3)).unwrap();
    }
}
