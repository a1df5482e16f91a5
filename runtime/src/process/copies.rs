//! Copies of the program's bytes: streams by their handles, ranges as spans, and those that are no copies for the engine.
//!
//! ```text
//! handle ─► UserStream: whose context, which stream ─► Engine ─► pending, until somebody has waited
//!                                                   └► driver: a copy for one link, beside the stream if need be
//! ```

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::owned::{Blocks, DeviceSet, OwnedEvent, OwnedStream, Span};
use glake_device::{CaptureState, CopyRequest, DeviceId, Driver, EventKind, Stream, StreamId};
use glake_transfer::{CopyHandle, CopyOptions, Engine, UserStream};
use glake_units::Bytes;

use super::pending::{Pending, captured};
use super::{Process, ProcessError, Result};

thread_local! {
    /// Whose the default handles are in the call that the thread makes; `None`: the current device's.
    static DEFAULT_OF: Cell<Option<DeviceId>> = const { Cell::new(None) };
}

/// What was said before, said again at the end.
struct Back(Option<DeviceId>);

impl Drop for Back {
    fn drop(&mut self) {
        DEFAULT_OF.set(self.0);
    }
}

/// Whose stream a default handle is meant to be, where a call says so.
fn default_of(raw: Stream) -> Option<DeviceId> {
    let is_default = matches!(raw, Stream(0) | Stream::LEGACY | Stream::PER_THREAD);
    DEFAULT_OF.get().filter(|_| is_default)
}

/// Copies that were none for the engine.
#[derive(Debug, Default)]
pub(super) struct NativeCopies {
    pub(super) copies: AtomicU64,
    pub(super) bytes: AtomicU64,
}

impl Process {
    /// Smaller copies are the driver's own: nothing is asked about their ends.
    #[inline]
    pub fn least_split(&self) -> Bytes {
        self.registry.engine.least()
    }

    /// Whether any GPU's link is lent to others' copies now; starts the relays where they are on and were not started.
    ///
    /// # Errors
    /// [`ProcessError::Transfer`].
    #[inline]
    pub fn has_relays(&self) -> Result<bool> {
        Ok(self.registry.engine.is_on() && !self.engine()?.relays().is_empty())
    }

    /// Enqueues work of one device in the order of another device's stream: behind what is there, before what comes.
    ///
    /// # Errors
    /// What `enqueue` or the driver answers; what was enqueued is done then.
    pub fn beside<E: From<ProcessError>>(
        &self,
        device: DeviceId,
        raw: Stream,
        enqueue: impl FnOnce(Stream) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let on = self.user_stream(raw)?;
        let fork = || -> glake_device::Result<(OwnedStream, OwnedEvent)> {
            let fork = OwnedEvent::new(&self.driver, on.device, EventKind::Plain)?;
            fork.record(raw)?;
            let lane = OwnedStream::new(&self.driver, device)?;
            lane.wait_for(fork.id())?;
            Ok((lane, OwnedEvent::new(&self.driver, device, EventKind::Plain)?))
        };
        let (lane, join) = fork().map_err(ProcessError::from)?;
        enqueue(lane.id())?;
        let joined = join
            .record(lane.id())
            .and_then(|()| self.driver.stream_wait_event(on.device, raw, join.id()))
            .or_else(|_| lane.synchronize());
        Ok(joined.map_err(ProcessError::from)?)
    }

    /// The device whose stream a handle is; the default handles are the thread's current device's, or those of the device that
    /// [`Process::with_default_of`] says.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn stream_device(&self, raw: Stream) -> Result<DeviceId> {
        match default_of(raw) {
            Some(device) => Ok(device),
            None => Ok(self.driver.stream_device(raw)?),
        }
    }

    /// Runs a call in which the default handles are the streams of a device, where one is given.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]: the call was not made.
    pub fn with_default_of<T>(&self, device: Option<DeviceId>, call: impl FnOnce() -> T) -> Result<T> {
        let Some(device) = device else { return Ok(call()) };
        self.device(i64::from(device.0))?;
        let _back = Back(DEFAULT_OF.replace(Some(device)));
        Ok(call())
    }

    /// The device in whose primary context a copy on a stream runs that this thread makes now; none where the current context, or the
    /// stream's, is another one: such copies are the driver's, and links of that GPU serve its own copies only from then on.
    ///
    /// # Errors
    /// What the driver answers.
    #[inline]
    pub fn primary_of(&self, raw: Stream) -> Result<Option<DeviceId>> {
        if let Some(device) = default_of(raw) {
            return Ok(Some(device));
        }
        let primary = self.driver.primary_of(raw)?;
        if primary.is_none()
            && let (Some(engine), Ok(device)) = (self.registry.engine.made(), self.driver.stream_device(raw))
        {
            engine.leave_to_program(device);
        }
        Ok(primary)
    }

    /// Copies of pool memory were enqueued on a stream, of a device if that is known: see [`glake_device::owned::Epochs::enqueued_on`].
    ///
    /// # Errors
    /// What the driver answers; the copies are done then, or their device lost.
    pub fn enqueued_on(&self, requests: &[CopyRequest], device: Option<DeviceId>, raw: Stream) -> Result<()> {
        let ends = requests.iter().flat_map(|request| [request.to, request.from]);
        let owners: DeviceSet = ends.filter_map(|start| self.pool_owner(start)).collect();
        if owners.is_empty() || self.devices.len() < 2 {
            return Ok(());
        }
        let device = device.map_or_else(|| self.stream_device(raw), Ok)?;
        Ok(self.epochs.enqueued_on(owners, (device, raw))?)
    }

    /// The driver, for what is no copy of the engine's.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Whether every copy that is waited for at once is read back.
    pub fn verifies_copies(&self) -> bool {
        self.registry.engine.config().verify
    }

    /// Counts a copy that the caller makes with the driver.
    #[inline]
    pub fn count_native(&self, size: Bytes) {
        self.native.copies.fetch_add(1, Ordering::Relaxed);
        self.native.bytes.fetch_add(size.get(), Ordering::Relaxed);
    }

    /// Enqueues a copy between host memory and a GPU's; the handle of one that is to be waited for.
    ///
    /// # Errors
    /// [`ProcessError::Transfer`], also for an earlier copy that failed: then nothing was done.
    pub fn copy(&self, to: &Span, from: &Span, raw: Stream, options: CopyOptions) -> Result<Option<u64>> {
        self.enqueue(raw, options, |engine, on, options| engine.copy(to, from, on, options))
    }

    /// Makes a copy between host memory and a GPU's, and returns when the bytes are there.
    ///
    /// # Errors
    /// As [`Process::copy`].
    pub fn copy_blocking(&self, to: &Span, from: &Span, raw: Stream, options: CopyOptions) -> Result<()> {
        let on = self.user_stream(raw)?;
        self.refuse_capture(on)?;
        let verify = options.verify || self.verifies_copies();
        Ok(self.engine()?.copy_blocking(to, from, on, CopyOptions { verify, ..options })?)
    }

    /// Compares both sides of copies that have arrived, whatever way they went, and copies again what differs.
    ///
    /// # Errors
    /// [`ProcessError::Transfer`]: bytes differ after the second copy too; what the driver answers.
    pub fn verify(&self, copies: &[(Span, Span)], raw: Stream) -> Result<()> {
        let on = self.user_stream(raw)?;
        Ok(self.engine()?.verify(copies, on)?)
    }

    /// Enqueues copies of blocks, in no order among themselves.
    ///
    /// # Errors
    /// As [`Process::copy`].
    pub fn copy_list(&self, blocks: &[Blocks<'_>], raw: Stream, options: CopyOptions) -> Result<Option<u64>> {
        self.enqueue(raw, options, |engine, on, options| engine.copy_blocks(blocks, on, options))
    }

    /// Enqueues copies of one range of host memory to several GPUs.
    ///
    /// # Errors
    /// As [`Process::copy`].
    pub fn copy_to_all(
        &self,
        to: &[Span],
        from: &Span,
        raw: Stream,
        options: CopyOptions,
    ) -> Result<Option<u64>> {
        self.enqueue(raw, options, |engine, on, options| engine.copy_to_all(to, from, on, options))
    }

    /// Whether what is enqueued on a stream can be waited for: not where it is captured into a graph.
    ///
    /// # Errors
    /// [`ProcessError::Captured`].
    pub fn check_waitable(&self, raw: Stream) -> Result<()> {
        self.refuse_capture(self.user_stream(raw)?)
    }

    /// A handle for all work that is on a stream now.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn mark(&self, raw: Stream) -> Result<u64> {
        let on = self.user_stream(raw)?;
        if self.is_captured(on)? {
            return Ok(self.pending.keep(Pending::Captured(on)));
        }
        let event = OwnedEvent::new(&self.driver, on.device, EventKind::Plain)?;
        event.record(raw)?;
        Ok(self.pending.keep(Pending::Native(event)))
    }

    /// Waits on the host until the bytes of a copy are there, and ends its handle; 0 is that of a copy which is done.
    ///
    /// # Errors
    /// [`ProcessError::UnknownCopy`]; why the bytes are not there.
    pub fn wait_for_copy(&self, handle: u64) -> Result<()> {
        if handle == 0 { Ok(()) } else { self.pending.wait(handle) }
    }

    /// Ends the handle of a copy without waiting for it; 0 is that of a copy which is done.
    ///
    /// # Errors
    /// [`ProcessError::UnknownCopy`].
    pub fn drop_copy(&self, handle: u64) -> Result<()> {
        if handle == 0 { Ok(()) } else { self.pending.drop(handle) }
    }

    /// Whether the bytes of a copy are there; its handle stays.
    ///
    /// # Errors
    /// As [`Process::wait_for_copy`].
    pub fn is_copy_done(&self, handle: u64) -> Result<bool> {
        if handle == 0 { Ok(true) } else { self.pending.is_done(handle) }
    }

    fn enqueue(
        &self,
        raw: Stream,
        options: CopyOptions,
        copy: impl FnOnce(&Engine, UserStream, CopyOptions) -> glake_transfer::Result<CopyHandle>,
    ) -> Result<Option<u64>> {
        let on = self.user_stream(raw)?;
        let captured = options.waited && self.is_captured(on)?;
        let options = CopyOptions { waited: options.waited && !captured, ..options };
        let handle = copy(self.engine()?, on, options)?;
        Ok(match (captured, options.waited) {
            (true, _) => Some(self.pending.keep(Pending::Captured(on))),
            (false, true) => Some(self.pending.keep(Pending::Engine(Box::new(handle)))),
            (false, false) => None,
        })
    }

    /// Whose stream a handle is, and which.
    fn user_stream(&self, raw: Stream) -> Result<UserStream> {
        let device = self.stream_device(raw)?;
        let stream = self.streams.of(&*self.driver, device, raw)?;
        Ok(UserStream { device, raw, id: StreamId(stream.key.0) })
    }

    /// # Errors
    /// [`ProcessError::Captured`].
    fn refuse_capture(&self, on: UserStream) -> Result<()> {
        if self.is_captured(on)? { Err(captured(on)) } else { Ok(()) }
    }

    /// Whether a stream is captured into a graph.
    pub(super) fn captures(&self, raw: Stream) -> Result<bool> {
        self.is_captured(self.user_stream(raw)?)
    }

    fn is_captured(&self, on: UserStream) -> Result<bool> {
        Ok(self.driver.capture_state(on.device, on.raw)? != CaptureState::None)
    }
}
