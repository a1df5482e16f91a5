//! Modules and kernels. A simulated kernel is a host closure with declared reads and writes.

use std::collections::HashMap;

use super::context::ContextId;
use super::denial::{Checked, refuse};
use super::resolve::Piece;
use super::system;
use glake_device::{
    Address, DriverError, HostKernel, Kernel, KernelMemory, Module, Refusal, Result, Touch, Verb,
};

#[derive(Debug, Default)]
pub(super) struct Modules {
    modules: HashMap<Module, Loaded>,
    kernels: HashMap<Kernel, (Module, ContextId, HostKernelEntry)>,
    next: u64,
}

#[derive(Debug)]
struct Loaded {
    context: ContextId,
    kernels: Vec<HostKernelEntry>,
}

#[derive(Clone, Copy)]
struct HostKernelEntry(HostKernel);

impl std::fmt::Debug for HostKernelEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.name)
    }
}

impl Modules {
    pub(super) fn load(&mut self, context: ContextId, kernels: &[HostKernel]) -> Module {
        self.next += 1;
        let module = Module(self.next);
        let kernels = kernels.iter().copied().map(HostKernelEntry).collect();
        self.modules.insert(module, Loaded { context, kernels });
        module
    }

    pub(super) fn unload(&mut self, context: ContextId, module: Module) -> Checked<()> {
        self.of(context, module)?;
        self.modules.remove(&module);
        self.kernels.retain(|_, (of, ..)| *of != module);
        Ok(())
    }

    pub(super) fn find(&mut self, context: ContextId, module: Module, name: &str) -> Checked<Kernel> {
        let found = self.of(context, module)?.kernels.iter().find(|kernel| kernel.0.name == name).copied();
        let Some(found) = found else { return refuse(Address(0), Refusal::UnknownHandle) };
        self.next += 1;
        let kernel = Kernel(self.next);
        self.kernels.insert(kernel, (module, context, found));
        Ok(kernel)
    }

    pub(super) fn get(&self, context: ContextId, kernel: Kernel) -> Checked<HostKernel> {
        match self.kernels.get(&kernel) {
            Some((_, of, found)) if *of == context => Ok(found.0),
            _ => refuse(Address(0), Refusal::UnknownHandle),
        }
    }

    /// Returns the number of modules loaded in a context.
    pub(super) fn made_in(&self, context: ContextId) -> u64 {
        self.modules.values().filter(|loaded| loaded.context == context).count() as u64
    }

    pub(super) fn len(&self) -> usize {
        self.modules.len()
    }

    fn of(&self, context: ContextId, module: Module) -> Checked<&Loaded> {
        match self.modules.get(&module) {
            Some(loaded) if loaded.context == context => Ok(loaded),
            _ => refuse(Address(0), Refusal::UnknownHandle),
        }
    }
}

/// Declared ranges of a kernel, resolved when it is enqueued.
#[derive(Clone, Debug, Default)]
pub(super) struct Declared {
    pub(super) reads: Ranges,
    pub(super) writes: Ranges,
}

/// Resolved ranges by start; they neither overlap nor touch ([`merged`]).
pub(super) type Ranges = Vec<(u64, Vec<Piece>)>;

/// Merges declared ranges; returns sorted, disjoint starts and ends that contain them.
pub(super) fn merged(touches: &[Touch]) -> Vec<(u64, u64)> {
    let range = |touch: &Touch| (touch.address.0, touch.address.0.saturating_add(touch.size.get()));
    let mut ranges: Vec<(u64, u64)> = touches.iter().map(range).filter(|(start, end)| start < end).collect();
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let joins = next.0 <= last.1;
        if joins {
            last.1 = last.1.max(next.1);
        }
        joins
    });
    ranges
}

/// Memory visible to a running kernel.
pub(super) struct DeclaredMemory<'a> {
    pub(super) declared: &'a Declared,
    /// First access outside the declared ranges.
    pub(super) stray: Option<Address>,
}

impl DeclaredMemory<'_> {
    fn each(
        &mut self,
        at: Address,
        size: usize,
        write: bool,
        mut visit: impl FnMut(u64, std::ops::Range<usize>),
    ) -> Result<()> {
        if size == 0 {
            return Ok(());
        }
        let Declared { reads, writes } = self.declared;
        let readable = if write { None } else { find(reads, at.0, size as u64) };
        let Some((start, pieces)) = readable.or_else(|| find(writes, at.0, size as u64)) else {
            self.stray.get_or_insert(at);
            return Err(DriverError::Refused { verb: Verb::Launch, address: at, reason: Refusal::NoAccess });
        };
        let (mut skip, mut done) = (at.0 - start, 0_usize);
        for piece in pieces {
            if skip >= piece.size {
                skip -= piece.size;
                continue;
            }
            let length = (size - done).min((piece.size - skip) as usize);
            visit(piece.pointer + skip, done..done + length);
            done += length;
            skip = 0;
            if done == size {
                break;
            }
        }
        Ok(())
    }
}

/// Returns the range that contains all of these bytes.
fn find(ranges: &Ranges, at: u64, size: u64) -> Option<&(u64, Vec<Piece>)> {
    let range = &ranges[ranges.partition_point(|range| range.0 <= at).checked_sub(1)?];
    let length: u64 = range.1.iter().map(|piece| piece.size).sum();
    (at.checked_add(size)? <= range.0 + length).then_some(range)
}

impl KernelMemory for DeclaredMemory<'_> {
    fn read(&mut self, from: Address, into: &mut [u8]) -> Result<()> {
        self.each(from, into.len(), false, |pointer, range| {
            // SAFETY: the piece was resolved to memory that the queued kernel holds; the slice is the caller's own.
            unsafe { system::read_bytes(pointer, &mut into[range]) };
        })
    }

    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<()> {
        self.each(to, bytes.len(), true, |pointer, range| {
            // SAFETY: as for reads, and the range was declared and checked as written.
            unsafe { system::write_bytes(pointer, &bytes[range]) };
        })
    }
}
