//! Memory of a simulated server: extents, their mappings, registered host memory and the resolution of addresses.
//!
//! Invariants: an extent lives while its handle or a mapping does. The resolution of an address is stable while it is held (`hold`),
//! because unmapping and unregistering are refused until then. Registered ranges of host memory do not overlap.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use glake_device::{
    Access, Address, DeviceId, DriverError, ExtentProperties, Handle, Place, PointerKind, Protection, Refusal,
};
use glake_units::Bytes;

use super::arena::{Arena, Backing, Extent, Kind, Own, file_name, place_of};
use super::context::{ContextId, ContextKind};
use super::denial::{Checked, Denial, refuse};
use super::file::{MappedFile, MemoryFile};
use super::order::Shadow;
use super::space::AddressSpace;
use super::system::{self, GRANULE};

/// Capabilities of a device's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Can {
    pub(super) export: bool,
    pub(super) gpu_direct: bool,
}

#[derive(Debug)]
pub(super) struct Memory {
    // Declared before the arenas, so that mappings are dropped before the memory they map.
    pub(super) space: AddressSpace,
    pub(super) host_table: HostTable,
    /// Last uses of host memory, by address.
    pub(super) host_shadow: Shadow,
    extents: HashMap<Handle, Extent>,
    gpus: Vec<Arena>,
    host: Arena,
    sockets: u32,
    /// Capabilities of each device's memory.
    can: Vec<Can>,
    /// Devices that may access each device's plain memory, as bits.
    guests: Vec<u64>,
    next: u64,
}

impl Memory {
    pub(super) fn new(gpus: Vec<Arena>, host: Arena, sockets: u32, can: Vec<Can>) -> Self {
        let guests = vec![0; gpus.len()];
        Memory {
            space: AddressSpace::default(),
            host_table: HostTable::default(),
            host_shadow: Shadow::default(),
            extents: HashMap::new(),
            gpus,
            host,
            sockets,
            can,
            guests,
            next: 1,
        }
    }

    /// Returns free and total memory of a device.
    pub(super) fn info(&mut self, device: DeviceId) -> Checked<(Bytes, Bytes)> {
        self.device(device)?;
        let arena = &mut self.gpus[device.0 as usize];
        let (used, total) = (arena.used()?, arena.capacity());
        Ok((total.saturating_sub(used), total))
    }

    /// Accounts for a context on a device.
    pub(super) fn charge_context(&mut self, device: DeviceId) -> Checked<()> {
        let index = self.device(device)?;
        self.gpus[index].charge_context()
    }

    pub(super) fn credit_context(&mut self, device: DeviceId) {
        if let Ok(index) = self.device(device) {
            self.gpus[index].credit_context();
        }
    }

    /// Returns the index of an existing device.
    pub(super) fn device(&self, device: DeviceId) -> Checked<usize> {
        let index = device.0 as usize;
        if index < self.gpus.len() {
            return Ok(index);
        }
        Err(Denial::NoSuchDevice { device, count: u32::try_from(self.gpus.len()).unwrap_or(u32::MAX) })
    }

    pub(super) fn granularity(&self, properties: ExtentProperties) -> Checked<Bytes> {
        self.place(properties.place)?;
        Ok(Bytes::new(GRANULE))
    }

    pub(super) fn create(&mut self, size: u64, properties: ExtentProperties) -> Checked<Handle> {
        let place = properties.place;
        self.place(place)?;
        if size == 0 || !size.is_multiple_of(GRANULE) {
            return refuse(Address(0), Refusal::InvalidValue);
        }
        if let Place::Gpu(device) = place {
            let can = self.can[self.device(device)?];
            if properties.exportable && !can.export || properties.gpu_direct && !can.gpu_direct {
                return Err(Denial::Unsupported);
            }
        }
        let arena = arena_mut(&mut self.gpus, &mut self.host, place);
        let backing = if properties.exportable {
            arena.charge(size)?;
            let own = Own::new(size, || MemoryFile::new(&file_name(place), size, true));
            Backing::Own(own.inspect_err(|_| arena.credit(size))?)
        } else {
            Backing::Arena { offset: arena.take(size)? }
        };
        let extent = Extent::new(place, size, backing);
        Ok(self.add(Extent { gpu_direct: properties.gpu_direct, ..extent }))
    }

    /// Returns whether the mapped memory at an address was created for RDMA; `None` if nothing is mapped there.
    pub(super) fn is_gpu_direct(&self, address: Address) -> Option<bool> {
        let (_, mapping) = self.space.find(address.0)?;
        Some(self.extent(mapping.extent)?.gpu_direct)
    }

    pub(super) fn release(&mut self, handle: Handle) -> Checked<()> {
        let known = handle.0 > 0 && handle.0 < self.next;
        match self.extents.get_mut(&handle) {
            Some(extent) if !extent.released => {
                extent.released = true;
                self.drop_if_unused(handle)
            }
            _ if known => refuse(Address(0), Refusal::ReleasedTwice),
            _ => refuse(Address(0), Refusal::UnknownHandle),
        }
    }

    pub(super) fn map(&mut self, start: u64, size: u64, handle: Handle) -> Checked<()> {
        let Some(extent) = self.extents.get_mut(&handle).filter(|extent| !extent.released) else {
            return refuse(Address(start), Refusal::UnknownHandle);
        };
        if extent.size != size {
            return refuse(Address(start), Refusal::InvalidValue);
        }
        let source = extent.source(arena(&self.gpus, &self.host, extent.place));
        self.space.map(start, size, handle, source)?;
        extent.mappings += 1;
        Ok(())
    }

    pub(super) fn unmap(&mut self, start: u64, size: u64) -> Checked<()> {
        for handle in self.space.unmap(start, size)? {
            if let Some(extent) = self.extents.get_mut(&handle) {
                extent.mappings -= 1;
                self.drop_if_unused(handle)?;
            }
        }
        Ok(())
    }

    pub(super) fn set_access(&mut self, start: u64, size: u64, access: &[Access]) -> Checked<usize> {
        for one in access {
            self.device(one.device)?;
        }
        self.space.set_access(start, size, access)
    }

    /// Allocates memory without a handle: mapped as a whole and owned by its device.
    pub(super) fn alloc(&mut self, kind: Kind, device: DeviceId, size: u64) -> Checked<Address> {
        self.device(device)?;
        let size = size.max(1).next_multiple_of(GRANULE);
        let properties = ExtentProperties { place: Place::Gpu(device), exportable: false, gpu_direct: false };
        let access = [Access { device, protection: Protection::ReadWrite }];
        let start = self.space.reserve(size)?;
        let filled = self.create(size, properties).and_then(|handle| {
            if let Some(extent) = self.extents.get_mut(&handle) {
                extent.kind = kind;
            }
            let mapped = self.map(start.0, size, handle);
            let mapped = mapped.and_then(|()| self.space.set_access(start.0, size, &access)).map(|_| ());
            self.release(handle).and(mapped)
        });
        if let Err(denial) = filled {
            self.space.unreserve(start.0, size)?;
            return Err(denial);
        }
        Ok(start)
    }

    pub(super) fn free(&mut self, start: Address) -> Checked<()> {
        let found = self.space.find(start.0).filter(|(at, _)| *at == start.0).map(|(_, mapping)| *mapping);
        let Some(mapping) = found.filter(|mapping| self.is_program(mapping.extent)) else {
            return refuse(start, Refusal::UnknownHandle);
        };
        self.unmap(start.0, mapping.size)?;
        self.space.unreserve(start.0, mapping.size)
    }

    pub(super) fn export(&mut self, handle: Handle) -> Checked<OwnedFd> {
        match self.extents.get_mut(&handle).filter(|extent| !extent.released) {
            None => refuse(Address(0), Refusal::UnknownHandle),
            Some(Extent { backing: Backing::Arena { .. } | Backing::Imported(_), .. }) => {
                refuse(Address(0), Refusal::InvalidValue)
            }
            Some(Extent { backing: Backing::Own(own), .. }) => own.file.share().map_err(descriptor_denied),
        }
    }

    pub(super) fn import(&mut self, shared: BorrowedFd<'_>) -> Checked<Handle> {
        let wrong = || Denial::Refused(Address(0), Refusal::InvalidValue);
        // The driver opens files temporarily, which fails without a free descriptor.
        let _own = shared.try_clone_to_owned().map_err(|error| descriptor_denied(error.into()))?;
        let name = std::fs::read_link(format!("/proc/self/fd/{}", shared.as_raw_fd()))?;
        let place = name.to_str().and_then(place_of).ok_or_else(wrong)?;
        self.place(place)?;
        let size = system::sealed_size(shared)?.filter(|size| *size > 0).ok_or_else(wrong)?;
        let own = Own::new(size, || MappedFile::new(shared, size))?;
        Ok(self.add(Extent::new(place, size, Backing::Imported(own))))
    }

    /// Gives a context access to a peer's plain memory; no effect for private contexts.
    pub(super) fn enable_peer_access(&mut self, context: ContextId, peer: DeviceId) -> Checked<()> {
        let (guest, owner) = (self.device(context.device)?, self.device(peer)?);
        if guest == owner {
            return refuse(Address(0), Refusal::InvalidValue);
        }
        if context.kind == ContextKind::Primary {
            self.guests[owner] |= 1 << guest;
        }
        Ok(())
    }

    /// Removes peer access in both directions after a device's primary context was released.
    pub(super) fn forget_peers(&mut self, device: DeviceId) {
        for (owner, guests) in (0_u32..).zip(&mut self.guests) {
            *guests &= if owner == device.0 { 0 } else { !(1 << (device.0 % 64)) };
        }
    }

    /// Records the context in which an extent was created.
    pub(super) fn note_made(&mut self, handle: Handle, context: ContextId) {
        if let Some(extent) = self.extents.get_mut(&handle) {
            extent.made_in = Some(context);
        }
    }

    /// Records the context in which memory without a handle was allocated.
    pub(super) fn note_made_at(&mut self, start: Address, context: ContextId) {
        if let Some((_, mapping)) = self.space.find(start.0) {
            let handle = mapping.extent;
            self.note_made(handle, context);
        }
    }

    /// Returns the allocation that a legacy IPC handle of an address would name: memory allocated as a whole. Mapped memory, pools and
    /// managed memory have none.
    pub(super) fn ipc_range(&self, address: Address) -> Option<(Address, Bytes)> {
        let (_, mapping) = self.space.find(address.0)?;
        let is_plain = self.extents.get(&mapping.extent)?.kind == Kind::Plain;
        is_plain.then(|| self.range(address)).flatten()
    }

    /// Returns the number of extents created in a context.
    pub(super) fn made_in(&self, context: ContextId) -> u64 {
        self.of(context.device).filter(|extent| extent.made_in == Some(context)).count() as u64
    }

    /// Returns whether the program has memory on a device that was allocated without a handle.
    pub(super) fn has_plain(&self, device: DeviceId) -> bool {
        self.of(device).any(|extent| extent.kind != Kind::Mapped)
    }

    fn of(&self, device: DeviceId) -> impl Iterator<Item = &Extent> {
        self.extents.values().filter(move |extent| extent.place == Place::Gpu(device))
    }

    pub(super) fn kind(&self, address: Address) -> PointerKind {
        match self.space.find(address.0).and_then(|(_, mapping)| self.extents.get(&mapping.extent)) {
            Some(Extent { kind: Kind::Managed, .. }) => PointerKind::Managed,
            Some(Extent { place: Place::Gpu(device), kind, .. }) => {
                PointerKind::Device { device: *device, mapped: *kind == Kind::Mapped }
            }
            Some(_) => PointerKind::Pinned,
            None if self.host_table.find(address.0).is_some() => PointerKind::Pinned,
            None => PointerKind::Pageable,
        }
    }

    /// Returns the device whose memory an address lies in.
    pub(super) fn owner(&self, address: Address) -> Option<DeviceId> {
        let (_, mapping) = self.space.find(address.0)?;
        match self.extents.get(&mapping.extent)?.place {
            Place::Gpu(device) => Some(device),
            Place::HostNuma(_) => None,
        }
    }

    /// Returns the mapping or registration that an address lies in.
    pub(super) fn range(&self, address: Address) -> Option<(Address, Bytes)> {
        let mapped = self.space.find(address.0).map(|(start, mapping)| (start, start + mapping.size));
        let (start, end) = mapped.or_else(|| self.host_table.find(address.0))?;
        Some((Address(start), Bytes::new(end - start)))
    }

    /// Returns the numbers of live reservations, mappings and extents.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        let (reservations, mappings) = self.space.counts();
        (reservations, mappings, self.extents.len())
    }

    pub(super) fn extent(&self, handle: Handle) -> Option<&Extent> {
        self.extents.get(&handle)
    }

    pub(super) fn extent_mut(&mut self, handle: Handle) -> Option<&mut Extent> {
        self.extents.get_mut(&handle)
    }

    /// Returns the host address of a byte of an extent.
    pub(super) fn pointer(&self, extent: &Extent, offset: u64) -> u64 {
        extent.pointer(arena(&self.gpus, &self.host, extent.place), offset)
    }

    /// Returns whether work in a context can access memory of `owner` of this kind, apart from access to mappings. Peers are enabled for
    /// each other's primary contexts only.
    pub(super) fn reaches(&self, context: ContextId, kind: Kind, owner: DeviceId) -> bool {
        let primary = context.kind == ContextKind::Primary;
        match kind {
            Kind::Mapped | Kind::Managed => true,
            Kind::Pool => context.device == owner,
            Kind::Plain => context.device == owner || primary && self.is_enabled(context.device, owner),
        }
    }

    /// Returns whether a device has access to a peer's plain memory.
    pub(super) fn is_enabled(&self, device: DeviceId, peer: DeviceId) -> bool {
        let guests = self.guests.get(peer.0 as usize).copied().unwrap_or_default();
        guests & (1 << (device.0 % 64)) != 0
    }

    /// Revokes a device's access to a peer's plain memory.
    pub(super) fn disable_peer_access(&mut self, device: DeviceId, peer: DeviceId) {
        if let Some(guests) = self.guests.get_mut(peer.0 as usize) {
            *guests &= !(1 << (device.0 % 64));
        }
    }

    fn is_program(&self, handle: Handle) -> bool {
        self.extents.get(&handle).is_some_and(|extent| extent.kind != Kind::Mapped)
    }

    fn place(&self, place: Place) -> Checked<()> {
        match place {
            Place::Gpu(device) => self.device(device).map(drop),
            Place::HostNuma(node) if node < self.sockets => Ok(()),
            Place::HostNuma(_) => refuse(Address(0), Refusal::InvalidValue),
        }
    }

    fn add(&mut self, extent: Extent) -> Handle {
        let handle = Handle(self.next);
        self.next += 1;
        self.extents.insert(handle, extent);
        handle
    }

    fn drop_if_unused(&mut self, handle: Handle) -> Checked<()> {
        let unused = |extent: &Extent| extent.released && extent.mappings == 0;
        if !self.extents.get(&handle).is_some_and(unused) {
            return Ok(());
        }
        let Some(extent) = self.extents.remove(&handle) else { return Ok(()) };
        let arena = arena_mut(&mut self.gpus, &mut self.host, extent.place);
        match extent.backing {
            Backing::Arena { offset } => arena.give(offset, extent.size)?,
            Backing::Own(_) => arena.credit(extent.size),
            Backing::Imported(_) => {}
        }
        Ok(())
    }
}

/// Maps a denial to CUDA's error for a failed system call.
fn descriptor_denied(denial: Denial) -> Denial {
    match denial {
        Denial::Os(_) | Denial::OutOfMemory(_) => Denial::Failed(DriverError::OPERATING_SYSTEM),
        other => other,
    }
}

fn arena<'a>(gpus: &'a [Arena], host: &'a Arena, place: Place) -> &'a Arena {
    match place {
        Place::Gpu(device) => gpus.get(device.0 as usize).unwrap_or(host),
        Place::HostNuma(_) => host,
    }
}

fn arena_mut<'a>(gpus: &'a mut [Arena], host: &'a mut Arena, place: Place) -> &'a mut Arena {
    match place {
        Place::Gpu(device) => gpus.get_mut(device.0 as usize).unwrap_or(host),
        Place::HostNuma(_) => host,
    }
}

/// Page size, the granularity of registrations.
const PAGE: u64 = 4096;

#[derive(Debug)]
struct Registered {
    size: u64,
    /// Number of enqueued operations that use it.
    users: u32,
}

#[derive(Debug, Default)]
pub(super) struct HostTable {
    ranges: BTreeMap<u64, Registered>,
}

impl HostTable {
    pub(super) fn register(&mut self, start: u64, size: u64) -> Checked<()> {
        let at = Address(start);
        let end = start.checked_add(size).filter(|_| size > 0 && start > 0);
        let Some(end) = end.filter(|_| start.is_multiple_of(PAGE) && size.is_multiple_of(PAGE)) else {
            return refuse(at, Refusal::InvalidValue);
        };
        if self.overlaps(start, end) {
            return refuse(at, Refusal::AlreadyMapped);
        }
        self.ranges.insert(start, Registered { size, users: 0 });
        Ok(())
    }

    pub(super) fn unregister(&mut self, start: u64) -> Checked<()> {
        match self.ranges.get(&start) {
            None => refuse(Address(start), Refusal::NotRegistered),
            Some(range) if range.users > 0 => refuse(Address(start), Refusal::InUse),
            Some(_) => {
                self.ranges.remove(&start);
                Ok(())
            }
        }
    }

    /// Returns start and end of the registration that contains a byte.
    pub(super) fn find(&self, at: u64) -> Option<(u64, u64)> {
        let (start, range) = self.ranges.range(..=at).next_back()?;
        (at < start + range.size).then_some((*start, start + range.size))
    }

    /// Returns whether any byte of a range is registered.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        self.ranges.range(..end).next_back().is_some_and(|(from, range)| from + range.size > start)
    }

    pub(super) fn hold(&mut self, start: u64) {
        if let Some(range) = self.ranges.get_mut(&start) {
            range.users += 1;
        }
    }

    pub(super) fn let_go(&mut self, start: u64) {
        if let Some(range) = self.ranges.get_mut(&start) {
            range.users = range.users.saturating_sub(1);
        }
    }
}
