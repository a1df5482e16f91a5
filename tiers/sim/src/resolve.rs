//! Resolution of address ranges for work in a context: location of the bytes and access rights.

use super::context::ContextId;
use super::denial::{Checked, Denial, refuse};
use super::extent::Kind;
use super::memory::Memory;
use super::order::{Order, Position, Stamp, VectorClock};
use super::route::End;
use glake_device::{Address, Handle, Place, Refusal};

/// A contiguous part of a range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Host address of the bytes in the simulator.
    pub(super) pointer: u64,
    pub(super) size: u64,
    /// Kind of memory, for the choice of a route.
    pub(super) end: End,
    home: Home,
}

#[derive(Clone, Copy, Debug)]
enum Home {
    Extent { handle: Handle, offset: u64, mapping: u64 },
    Pinned { registration: u64 },
    Pageable,
}

/// Object that enqueued work keeps from being unmapped or unregistered.
#[derive(Clone, Copy, Debug)]
pub(super) enum Hold {
    Mapping(u64),
    Registration(u64),
}

impl Piece {
    pub(super) fn hold(&self) -> Option<Hold> {
        match self.home {
            Home::Extent { mapping, .. } => Some(Hold::Mapping(mapping)),
            Home::Pinned { registration } => Some(Hold::Registration(registration)),
            Home::Pageable => None,
        }
    }

    /// Returns the address that the memory is mapped at; zero for host memory, which has only one.
    fn via(&self) -> u64 {
        match self.home {
            Home::Extent { mapping, .. } => mapping,
            Home::Pinned { .. } | Home::Pageable => 0,
        }
    }

    /// Returns the start in the shadow of its extent or of the host.
    fn shadow_start(&self) -> u64 {
        match self.home {
            Home::Extent { offset, .. } => offset,
            Home::Pinned { .. } | Home::Pageable => self.pointer,
        }
    }

    /// Splits the piece into its first `size` bytes and the rest.
    pub(super) fn split(mut self, size: u64) -> (Piece, Piece) {
        let first = Piece { size, ..self };
        self.pointer += size;
        self.size -= size;
        if let Home::Extent { offset, .. } = &mut self.home {
            *offset += size;
        }
        (first, self)
    }
}

/// Kind of access by enqueued work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    Write,
    /// Signal between streams: establishes order instead of requiring it.
    Signal,
}

impl Memory {
    /// Resolves a range for a copy in a context: any GPU's memory that the program allocated, and mapped memory according to its access
    /// rights.
    pub(super) fn resolve(
        &self,
        context: ContextId,
        start: Address,
        size: u64,
        usage: Use,
    ) -> Checked<Vec<Piece>> {
        let wrong = Denial::Refused(start, Refusal::InvalidValue);
        let Some(end) = start.0.checked_add(size).filter(|_| start.0 >= 4096) else { return Err(wrong) };
        if size == 0 {
            return Ok(Vec::new());
        }
        if self.space.find(start.0).is_none() && !self.space.is_reserved(start.0) {
            return self.resolve_host(start.0, end);
        }
        let mut pieces = Vec::new();
        let mut at = start.0;
        while at < end {
            let piece = self.resolve_mapped(context, at, end, usage)?;
            at += piece.size;
            pieces.push(piece);
        }
        Ok(pieces)
    }

    /// Resolves host memory, whose kind is that of its first byte: CUDA refuses a range that leaves the registration it begins in, and
    /// treats a range that begins outside of any as pageable memory.
    fn resolve_host(&self, start: u64, end: u64) -> Checked<Vec<Piece>> {
        let size = end - start;
        let piece = |end, home| Ok(vec![Piece { pointer: start, size, end, home }]);
        match self.host_table.find(start) {
            None => piece(End::Pageable, Home::Pageable),
            Some((registration, until)) if end <= until => piece(End::Pinned, Home::Pinned { registration }),
            Some(_) => refuse(Address(start), Refusal::InvalidValue),
        }
    }

    fn resolve_mapped(&self, context: ContextId, at: u64, end: u64, usage: Use) -> Checked<Piece> {
        let found = self.space.find(at);
        let found = found.and_then(|(from, mapping)| Some((from, mapping, self.extent(mapping.extent)?)));
        let Some((from, mapping, extent)) = found else {
            return refuse(Address(at), Refusal::NotMapped);
        };
        let mapped = extent.kind == Kind::Mapped;
        let route_end = match extent.place {
            Place::HostNuma(_) => End::Pinned,
            Place::Gpu(owner) => {
                let index = owner.0 as usize;
                match self.reaches(context, extent.kind, owner) {
                    true => End::Gpu { index, mapped },
                    false => End::Foreign { index },
                }
            }
        };
        let breach = mapping.reach.breach(context.device, usage == Use::Write);
        if let Some(rule) = breach.filter(|_| mapped) {
            return refuse(Address(at), rule);
        }
        let offset = at - from;
        Ok(Piece {
            pointer: self.pointer(extent, offset),
            size: (mapping.size - offset).min(end - at),
            end: route_end,
            home: Home::Extent { handle: mapping.extent, offset, mapping: from },
        })
    }

    /// Refuses a use that is not ordered after an earlier conflicting one.
    pub(super) fn check_order(
        &self,
        piece: &Piece,
        usage: Use,
        order: &Order,
        seen: &VectorClock,
    ) -> Checked<()> {
        if usage == Use::Signal {
            return Ok(());
        }
        let breach = |stamp| order.breach(seen, stamp, piece.via());
        let (start, write) = (piece.shadow_start(), usage == Use::Write);
        let shadow = match piece.home {
            Home::Extent { handle, .. } => self.extent(handle).map(|extent| &extent.shadow),
            _ => Some(&self.host_shadow),
        };
        let conflict = shadow.and_then(|shadow| shadow.conflict(start, start + piece.size, write, breach));
        conflict.map_or(Ok(()), |(at, rule)| refuse(Address(piece.via() + at), rule))
    }

    /// Records a use of a piece.
    pub(super) fn note_use(&mut self, piece: &Piece, usage: Use, position: Position, seen: &VectorClock) {
        if usage == Use::Signal {
            return;
        }
        let shadow = match piece.home {
            Home::Extent { handle, .. } => match self.extent_mut(handle) {
                Some(extent) => &mut extent.shadow,
                None => return,
            },
            _ => &mut self.host_shadow,
        };
        let start = piece.shadow_start();
        shadow.note(start, start + piece.size, usage == Use::Write, Stamp { position, via: piece.via() });
        shadow.prune(seen);
    }

    pub(super) fn hold(&mut self, hold: Hold) {
        match hold {
            Hold::Mapping(start) => {
                if let Some(mapping) = self.space.mapping_mut(start) {
                    mapping.users += 1;
                }
            }
            Hold::Registration(start) => self.host_table.hold(start),
        }
    }

    pub(super) fn let_go(&mut self, hold: Hold) {
        match hold {
            Hold::Mapping(start) => {
                if let Some(mapping) = self.space.mapping_mut(start) {
                    mapping.users = mapping.users.saturating_sub(1);
                }
            }
            Hold::Registration(start) => self.host_table.let_go(start),
        }
    }
}
