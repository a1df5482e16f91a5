//! Modules and kernels: on the simulated device a kernel is a host closure with declared reads and writes.

use std::collections::HashMap;

use super::denial::{Checked, refuse};
use super::resolve::Piece;
use super::system;
use crate::{
    Address, DeviceId, DriverError, HostKernel, Kernel, KernelMemory, Module, Refusal, Result, Verb,
};

#[derive(Debug, Default)]
pub(super) struct Modules {
    modules: HashMap<Module, Loaded>,
    kernels: HashMap<Kernel, (Module, DeviceId, HostKernelEntry)>,
    next: u64,
}

#[derive(Debug)]
struct Loaded {
    device: DeviceId,
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
    pub(super) fn load(&mut self, device: DeviceId, kernels: &[HostKernel]) -> Module {
        self.next += 1;
        let module = Module(self.next);
        let kernels = kernels.iter().copied().map(HostKernelEntry).collect();
        self.modules.insert(module, Loaded { device, kernels });
        module
    }

    pub(super) fn unload(&mut self, device: DeviceId, module: Module) -> Checked<()> {
        self.of(device, module)?;
        self.modules.remove(&module);
        self.kernels.retain(|_, (of, ..)| *of != module);
        Ok(())
    }

    pub(super) fn find(&mut self, device: DeviceId, module: Module, name: &str) -> Checked<Kernel> {
        let found = self.of(device, module)?.kernels.iter().find(|kernel| kernel.0.name == name).copied();
        let Some(found) = found else { return refuse(Address(0), Refusal::UnknownHandle) };
        self.next += 1;
        let kernel = Kernel(self.next);
        self.kernels.insert(kernel, (module, device, found));
        Ok(kernel)
    }

    pub(super) fn get(&self, device: DeviceId, kernel: Kernel) -> Checked<HostKernel> {
        match self.kernels.get(&kernel) {
            Some((_, of, found)) if *of == device => Ok(found.0),
            _ => refuse(Address(0), Refusal::UnknownHandle),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.modules.len()
    }

    fn of(&self, device: DeviceId, module: Module) -> Checked<&Loaded> {
        match self.modules.get(&module) {
            Some(loaded) if loaded.device == device => Ok(loaded),
            _ => refuse(Address(0), Refusal::UnknownHandle),
        }
    }
}

/// A range that a kernel declared, resolved when it was enqueued.
#[derive(Clone, Debug)]
pub(super) struct Declared {
    pub(super) start: u64,
    pub(super) size: u64,
    pub(super) writable: bool,
    pub(super) pieces: Vec<Piece>,
}

/// The memory of a running kernel.
pub(super) struct DeclaredMemory<'a> {
    pub(super) declared: &'a [Declared],
    /// The first touch outside of it.
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
        let end = at.0.checked_add(size as u64);
        let inside = |range: &&Declared| {
            (range.writable || !write)
                && range.start <= at.0
                && end.is_some_and(|end| end <= range.start + range.size)
        };
        let Some(range) = self.declared.iter().find(inside) else {
            self.stray.get_or_insert(at);
            return Err(DriverError::Refused { verb: Verb::Launch, address: at, reason: Refusal::NoAccess });
        };
        let (mut skip, mut done) = (at.0 - range.start, 0_usize);
        for piece in &range.pieces {
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
