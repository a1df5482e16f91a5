//! Reserved host memory: a fixed range for bytes that are on a GPU only while they are used, such as frozen weights.
//!
//! ```text
//! host memory:  reserve ── host: written ─────────────────────── host: read, written ──────── release
//! in:                             └─ begin_reload ─► a block        ▲   └─ begin_reload ─► another block
//! out:                                    store of the block, if it was written ─┘
//! ```
//!
//! The address is the same until the release, so that the host may use the memory as its own between copies. Without a store, bytes only
//! come: a block that was not written is freed, and nothing moves.

use std::sync::Arc;

use glake_device::{Address, Stream};
use glake_transfer::paths::Direction;
use glake_units::Bytes;

use super::entries::{Away, Entry};
use super::host_memory::{HostMemory, HostRange};
use super::{Offload, ProcessError, Result};

impl Offload {
    /// Reserves contiguous host memory of a device until [`Offload::release`], and returns its number, for [`Offload::begin_reload`] and
    /// the other verbs of an entry. Its contents are undefined.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]; [`ProcessError::Host`] if there is no host memory; the driver's error.
    pub fn reserve(&self, device: i64, size: Bytes) -> Result<u64> {
        if size.is_zero() {
            return Ok(self.entries.add(Entry::empty()));
        }
        let device = self.registry.device(device)?.id();
        let host = self.host(device)?;
        let taken = host.reserve(size).inspect_err(|error| self.note_refused(error))?;
        // Copies of earlier owners may still write there.
        let queue = self.queues.of(device, Direction::FromGpu);
        match queue.and_then(|queue| queue.lock().mark()) {
            Ok(out) => Ok(self.entries.add(reserved(device, size, taken, out, host))),
            Err(error) => {
                host.put(taken, None);
                Err(error)
            }
        }
    }

    /// Checks whether host memory of a device can be had for `size` bytes, while `freed` bytes of the process's other memory are freed.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]; [`ProcessError::Host`] if there is too little; nothing is pinned.
    pub fn has_room(&self, device: i64, size: Bytes, freed: Bytes) -> Result<()> {
        let device = self.registry.device(device)?.id();
        self.host(device)?.has_room(size, freed)
    }

    /// Copies a live block's bytes into reserved memory, after the work enqueued on `stream` so far and after the last copy in. The caller
    /// may free the block afterwards. Enqueues the copy without waiting.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the number is unknown or of an offloaded entry, and for memory of another GPU; errors as of
    /// [`Offload::offload`] for the address. If the copy was begun, the reserved bytes are undefined until a store succeeds: the block
    /// still has them.
    pub fn store(&self, id: u64, raw: Stream, address: Address) -> Result<()> {
        let entry = self.entries.of(id)?;
        // Without locks, because it may call a program's hooks.
        self.regions.touched(address)?;
        let mut entry = entry.lock();
        let last = entry.load.as_ref().map(|load| load.event.clone());
        let Some((away, _)) = entry.away.as_mut() else { return Ok(()) };
        if !away.is_reserved {
            return Err(ProcessError::invalid(format!(
                "the number {id} is of offloaded bytes, which are not stored again: reserve memory for them"
            )));
        }
        let device = self.device_of(address)?;
        if device != away.device {
            return Err(ProcessError::invalid(format!(
                "the number {id} is of memory reserved for {}, and the bytes to store are on {device}: copy them to {} first",
                away.device, away.device
            )));
        }
        self.streams.with_default_of(Some(device), || {
            let on = self.stream(raw)?;
            let place = self.place(address, away.size)?;
            let out = self.queues.of(device, Direction::FromGpu)?;
            let mut out = out.lock();
            if let Some(last) = &last {
                out.wait_for(last)?;
            }
            let copied = out.copy_out(on, &away.taken, &place.span).and_then(|(event, handles)| {
                place.started.pool.read_holds().hold(place.block, &event, out.id())?;
                Ok((event, handles))
            });
            match copied {
                Ok((event, handles)) => {
                    (away.out, away.copied, away.is_torn) = (event, handles, false);
                    Ok(())
                }
                Err(error) => {
                    // The caller may free the block.
                    out.finish();
                    away.is_torn = true;
                    Err(error)
                }
            }
        })?
    }

    /// Waits on the host for the copies of reserved memory, and returns its address: the host may read and write the bytes until the next
    /// copy begins. The address is the same each time. 0 for a reservation of 0 bytes.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the number is unknown or of an offloaded entry; [`ProcessError::Transfer`] if the last store failed;
    /// the driver's error.
    pub fn host_address(&self, id: u64) -> Result<Address> {
        let entry = self.entries.of(id)?;
        let (address, copies) = {
            let entry = entry.lock();
            let Some((away, _)) = &entry.away else { return Ok(Address(0)) };
            let Some(address) = away.taken.address().filter(|_| away.is_reserved) else {
                return Err(ProcessError::invalid(format!(
                    "the number {id} is of offloaded bytes, which have no address: reload them"
                )));
            };
            let read = entry.load.as_ref().map(|load| load.event.clone());
            let before = away.taken.mark.as_ref().map(|mark| mark.event.clone());
            (address, [Some(away.out.clone()), read, before])
        };
        for copy in copies.iter().flatten().filter(|_| !self.registry.is_stopped()) {
            copy.synchronize()?;
        }
        let mut entry = entry.lock();
        entry.away.as_mut().map_or(Ok(()), |(away, _)| away.check_bytes(id))?;
        Ok(address)
    }
}

fn reserved(
    device: glake_device::DeviceId,
    size: Bytes,
    taken: HostRange,
    out: Arc<glake_device::owned::OwnedEvent>,
    host: Arc<HostMemory>,
) -> Entry {
    let (copied, watched, is_torn, is_reserved) = (Vec::new(), None, false, true);
    Entry::away(Away { device, size, taken, out, copied, watched, is_torn, is_reserved }, host)
}
