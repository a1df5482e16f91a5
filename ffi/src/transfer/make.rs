//! Which way a copy goes, and its enqueueing.

use std::ffi::c_void;

use glake_device::owned::{Blocks, Span};
use glake_device::{Address, CopyRequest, DeviceId, PointerKind};
use glake_runtime::process::{Endpoint, Process, ProcessError};
use glake_transfer::graph::Direction;
use glake_units::Bytes;

use super::flags::Asked;
use crate::block::address;
use crate::status::Failure;

pub(super) fn request(to: *mut c_void, from: *const c_void, size: usize) -> Result<CopyRequest, Failure> {
    let null = |pointer: Address| pointer.0 == 0 && size > 0;
    let request = CopyRequest { to: address(to), from: address(from), size: Bytes::new(size as u64) };
    match (null(request.to), null(request.from)) {
        (true, _) => Err(Failure::invalid(format_args!("to is null, and {size} bytes shall go there"))),
        (_, true) => {
            Err(Failure::invalid(format_args!("from is null, and {size} bytes shall come from there")))
        }
        _ => Ok(request),
    }
}

/// Memory that is away comes back before a copy touches it.
#[inline]
pub(super) fn bring_back(process: &Process, requests: &[CopyRequest]) -> Result<(), Failure> {
    for request in requests {
        process.bring_back(request.to)?;
        process.bring_back(request.from)?;
    }
    Ok(())
}

/// What both ends are, where it is a copy for the engine.
pub(super) fn split(
    process: &Process,
    request: &CopyRequest,
    asked: Asked,
) -> Result<Option<(Endpoint, Endpoint)>, Failure> {
    if asked.direct || request.size < process.least_split() {
        return Ok(None);
    }
    let Some(ends) = process.both_ends(request, asked.stream, verifies(process, asked))? else {
        return Ok(None);
    };
    match process.primary_of(asked.stream)? {
        Some(device) => Ok(sides(device, Some(ends))),
        None => Ok(None),
    }
}

/// The ends, where one is host memory and the other a GPU's. Where the stream's device may not make the copy the engine has no
/// way back to one link: then it is none for it.
fn sides(device: DeviceId, ends: Option<(Endpoint, Endpoint)>) -> Option<(Endpoint, Endpoint)> {
    ends.filter(|(to, from)| to.is_other_side_of(from) && to.is_open_to(device) && from.is_open_to(device))
}

/// Makes a copy where it is one for the engine, and goes the way that is asked for; whether it was. What is refused before anything
/// was enqueued is none for it.
///
/// # Safety
/// As [`super::glake_copy_async`].
pub(super) unsafe fn attempt(
    process: &Process,
    request: CopyRequest,
    asked: Asked,
    way: Option<Direction>,
) -> Result<bool, Failure> {
    let taken = match split(process, &request, asked) {
        Ok(Some(ends)) if goes(ends, way) => {
            // SAFETY: the caller's promise.
            unsafe { enqueue(process, request, ends, asked, false) }.map(|_| true)
        }
        Ok(_) => Ok(false),
        Err(failure) => Err(failure),
    };
    match taken {
        Err(failure) if failure.is_early() => Ok(false),
        taken => taken,
    }
}

/// Whether a copy between these goes a way. Memory that moves as it is touched is on neither side.
fn goes((to, from): (Endpoint, Endpoint), way: Option<Direction>) -> bool {
    let is_host = |end: Endpoint| matches!(end.kind, PointerKind::Pinned | PointerKind::Pageable);
    match way {
        None => true,
        Some(Direction::ToGpu) => is_host(from),
        Some(Direction::FromGpu) => is_host(to),
    }
}

/// Whether the bytes of a copy are compared, of whatever size and whatever way.
fn verifies(process: &Process, asked: Asked) -> bool {
    asked.now && (asked.verify || process.verifies_copies())
}

/// Makes one copy, on whichever way; its handle.
///
/// # Safety
/// As [`super::glake_copy_async`].
pub(super) unsafe fn copy(
    process: &Process,
    request: CopyRequest,
    asked: Asked,
    waited: bool,
) -> Result<u64, Failure> {
    bring_back(process, &[request])?;
    match split(process, &request, asked)? {
        // SAFETY: the caller's promise.
        Some(ends) => unsafe { enqueue(process, request, ends, asked, waited) },
        // SAFETY: the caller's promise.
        None => unsafe { native(process, &[request], asked, waited) },
    }
}

/// Gives a copy to the engine; its handle.
///
/// # Safety
/// As [`super::glake_copy_async`], and the ends are what was found.
pub(super) unsafe fn enqueue(
    process: &Process,
    request: CopyRequest,
    ends: (Endpoint, Endpoint),
    asked: Asked,
    waited: bool,
) -> Result<u64, Failure> {
    // SAFETY: the caller's promise.
    let (to, from) = unsafe { spans(request, ends) };
    if asked.now {
        process.copy_blocking(&to, &from, asked.stream, asked.options(false))?;
        return Ok(0);
    }
    Ok(process.copy(&to, &from, asked.stream, asked.options(waited))?.unwrap_or(0))
}

/// Makes the driver's own copies; their handle.
///
/// # Safety
/// As [`super::glake_copy_async`], for each.
unsafe fn native(
    process: &Process,
    requests: &[CopyRequest],
    asked: Asked,
    waited: bool,
) -> Result<u64, Failure> {
    let driver = process.driver();
    // A copy that nobody waits for is made in the context that is current, whichever that is.
    if (asked.now || waited) && process.primary_of(asked.stream)?.is_none() {
        return Err(Failure::unsupported(
            "nobody can wait here for a copy under a context that is not its GPU's primary one: make that one current, or wait for \
             the stream",
        ));
    }
    if asked.now {
        process.check_waitable(asked.stream)?;
    }
    // The device of the stream, once it is asked for.
    let mut known = None;
    let enqueued = requests.iter().filter(|request| !request.size.is_zero()).try_for_each(|request| {
        process.count_native(request.size);
        if asked.device.is_none() && process.is_open_to_all(request) {
            // SAFETY: the caller's promise.
            return unsafe { driver.copy_on(*request, asked.stream) }.map_err(ProcessError::from);
        }
        let device = known.map_or_else(|| process.stream_device(asked.stream), Ok)?;
        known = Some(device);
        // SAFETY: the caller's promise.
        let copy =
            |device, stream| unsafe { driver.copy(device, *request, stream) }.map_err(ProcessError::from);
        match process.device_for(device, request) {
            None => copy(device, asked.stream),
            Some(other) => process.beside(other, asked.stream, |stream| {
                copy(other, stream)?;
                process.enqueued_on(&[*request], Some(other), stream)
            }),
        }
    });
    if enqueued.is_err() || !asked.now {
        // Also of what fails: a part may be enqueued.
        let told = process.enqueued_on(requests, known, asked.stream);
        enqueued?;
        told?;
    }
    if asked.now {
        let device = known.map_or_else(|| process.stream_device(asked.stream), Ok)?;
        driver.stream_synchronize(device, asked.stream).map_err(ProcessError::from)?;
        // SAFETY: the caller's promise.
        unsafe { compare(process, requests, asked) }?;
        return Ok(0);
    }
    if waited { Ok(process.mark(asked.stream)?) } else { Ok(0) }
}

/// # Safety
/// As [`super::glake_copy_list`].
pub(super) unsafe fn copy_list(
    process: &Process,
    requests: &[CopyRequest],
    asked: Asked,
    waited: bool,
) -> Result<u64, Failure> {
    bring_back(process, requests)?;
    let all = requests.iter().fold(Bytes::ZERO, |all, request| all.saturating_add(request.size));
    if all < process.least_split() || asked.direct {
        // SAFETY: the caller's promise.
        return unsafe { native(process, requests, asked, waited) };
    }
    if asked.now {
        process.check_waitable(asked.stream)?;
    }
    let Some(device) = process.primary_of(asked.stream)? else {
        // SAFETY: the caller's promise.
        return unsafe { native(process, requests, asked, waited) };
    };
    let mut ends = process.ends();
    let (mut blocks, mut rest, mut left) = (Vec::new(), Vec::new(), requests);
    while !left.is_empty() {
        let (ends, count) = ends.alike(left)?;
        let (alike, others) = left.split_at(count);
        left = others;
        match sides(device, ends) {
            // SAFETY: the caller's promise; all ends are what was found of the first.
            Some((to, from)) => blocks.push(unsafe { Blocks::lent(to.side(), from.side(), alike) }),
            None => rest.extend_from_slice(alike),
        }
    }
    // SAFETY: the caller's promise.
    unsafe { native(process, &rest, Asked { now: false, ..asked }, false) }?;
    let handle = process.copy_list(&blocks, asked.stream, asked.options(waited || asked.now))?.unwrap_or(0);
    // SAFETY: the caller's promise.
    unsafe { waited_for(process, handle, requests, asked) }
}

/// # Safety
/// As [`super::glake_copy_to_all`].
pub(super) unsafe fn copy_to_all(
    process: &Process,
    requests: &[CopyRequest],
    asked: Asked,
    waited: bool,
) -> Result<u64, Failure> {
    bring_back(process, requests)?;
    let small = requests.first().is_none_or(|first| first.size < process.least_split());
    let ends: Option<Vec<(Endpoint, Endpoint)>> = match small || asked.direct {
        true => None,
        false => requests.iter().map(|request| split(process, request, asked)).collect::<Result<_, _>>()?,
    };
    let Some(ends) = ends else {
        // SAFETY: the caller's promise.
        return unsafe { native(process, requests, asked, waited) };
    };
    // SAFETY: the caller's promise.
    let pairs: Vec<(Span, Span)> =
        requests.iter().zip(ends).map(|(request, ends)| unsafe { spans(*request, ends) }).collect();
    if asked.now {
        process.check_waitable(asked.stream)?;
    }
    let Some(from) = pairs.first().map(|(_, from)| from.clone()) else { return Ok(0) };
    let to: Vec<Span> = pairs.into_iter().map(|(to, _)| to).collect();
    let options = asked.options(waited || asked.now);
    let handle = process.copy_to_all(&to, &from, asked.stream, options)?.unwrap_or(0);
    // SAFETY: the caller's promise.
    unsafe { waited_for(process, handle, requests, asked) }
}

/// # Safety
/// As [`super::glake_copy_async`], for each.
unsafe fn waited_for(
    process: &Process,
    handle: u64,
    requests: &[CopyRequest],
    asked: Asked,
) -> Result<u64, Failure> {
    if !asked.now {
        return Ok(handle);
    }
    process.wait_for_copy(handle)?;
    // SAFETY: the caller's promise.
    unsafe { compare(process, requests, asked) }?;
    Ok(0)
}

/// Compares both sides of copies that are there, where that is asked for: every way that a copy can take ends here, but for those
/// that [`Process::copy_blocking`] makes, which compares itself.
///
/// # Safety
/// As [`super::glake_copy_async`], for each.
unsafe fn compare(process: &Process, requests: &[CopyRequest], asked: Asked) -> Result<(), Failure> {
    if !verifies(process, asked) {
        return Ok(());
    }
    let (mut ends, mut copies) = (process.ends(), Vec::with_capacity(requests.len()));
    for request in requests {
        // SAFETY: the caller's promise; each part's ends are what was found.
        copies.extend(ends.parts(request)?.into_iter().map(|(part, ends)| unsafe { spans(part, ends) }));
    }
    Ok(process.verify(&copies, asked.stream)?)
}

/// # Safety
/// Both ranges are memory that lives, and that nothing else touches unordered, until all work that is enqueued on it has
/// run; the ends say what they are.
unsafe fn spans(request: CopyRequest, ends: (Endpoint, Endpoint)) -> (Span, Span) {
    let CopyRequest { to, from, size } = request;
    // SAFETY: the caller's promise.
    unsafe {
        (Span::lent(to, size, ends.0.kind, ends.0.reach), Span::lent(from, size, ends.1.kind, ends.1.reach))
    }
}
