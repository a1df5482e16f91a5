//! Sites of a program that offload: what is to be offloaded of each pass, and when its reloads begin.

use glake_runtime::process::ItemId;
use glake_units::Bytes;

use crate::status::Failure;
use crate::{guard, library};

/// Makes a site of a program that offloads: it learns from each of its passes in which order what it packs is read, and says when
/// reloads begin. A pass begins with the first item that is packed and ends when all that were are dropped. `site` is its number,
/// above 0, and never given twice.
///
/// # Safety
/// `site` is null or may be written; null is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_site_create(site: *mut u64) -> i32 {
    guard::answer(|| {
        // Before anything is done that nobody could undo.
        // SAFETY: the caller's promise.
        unsafe { guard::put(site, "site", 0) }?;
        let given = library::process()?.offload().sites().create();
        // SAFETY: the caller's promise.
        unsafe { guard::put(site, "site", given) }
    })
}

/// Forgets a site and what it learned. In a forked child and at the end of the process nothing is done.
///
/// `GLAKE_INVALID`: it was released before, or never made.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_site_release(site: u64) -> i32 {
    library::give_up(|process| Ok(process.offload().release_site(site)?))
}

/// The next bytes that a pass saves, each range once. `item` is their number in the pass, from 0 on; `is_offloaded` whether they are to
/// be offloaded (1) or to stay (0). `begin` has room for `room` items and gets those whose reloads are to begin first, in this order;
/// `count` how many these are. Those that find no room come with the next call of the site.
///
/// `GLAKE_INVALID`: there is no such site.
///
/// # Safety
/// `item`, `is_offloaded` and `count` may be written, or are null, which is refused; `begin` may be written `room` times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_packed(
    site: u64,
    bytes: u64,
    item: *mut u64,
    is_offloaded: *mut i32,
    begin: *mut u64,
    room: usize,
    count: *mut usize,
) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        unsafe {
            guard::put(item, "item", 0)?;
            guard::put(is_offloaded, "is_offloaded", 0)?;
            guard::put(count, "count", 0)?;
        }
        // SAFETY: the caller's promise.
        let begin = unsafe { room_of(begin, room) }?;
        let (packed, begun) = library::process()?.offload().sites().packed(site, Bytes::new(bytes), begin)?;
        // SAFETY: the caller's promise.
        unsafe {
            guard::put(item, "item", packed.item.index() as u64)?;
            guard::put(is_offloaded, "is_offloaded", packed.is_offloaded.into())?;
            guard::put(count, "count", begun)
        }
    })
}

/// An item of the pass is read, or read once more. `begin`, `room` and `count` as of `glake_offload_packed`.
///
/// `GLAKE_INVALID`: there is no such site, or its pass has no such item.
///
/// # Safety
/// `count` may be written, or is null, which is refused; `begin` may be written `room` times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_unpacked(
    site: u64,
    item: u64,
    begin: *mut u64,
    room: usize,
    count: *mut usize,
) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        unsafe { guard::put(count, "count", 0) }?;
        // SAFETY: the caller's promise.
        let begin = unsafe { room_of(begin, room) }?;
        let begun = library::process()?.offload().sites().unpacked(site, number(item), begin)?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(count, "count", begun) }
    })
}

/// What was reloaded of an item is gone from its GPU again, and the item may be read once more.
///
/// `GLAKE_INVALID`: there is no such site.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_freed(site: u64, item: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().sites().freed(site, number(item))?))
}

/// Nobody reads an item any more. In a forked child and at the end of the process nothing is done.
///
/// `GLAKE_INVALID`: there is no such site, or its pass has no such item.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_dropped(site: u64, item: u64) -> i32 {
    library::give_up(|process| Ok(process.offload().sites().dropped(site, number(item))?))
}

/// Where items are written to.
///
/// # Safety
/// `begin` is null, or may be written `room` times.
unsafe fn room_of<'a>(begin: *mut u64, room: usize) -> Result<&'a mut [u64], Failure> {
    match (begin.is_null(), room) {
        (_, 0) => Ok(&mut []),
        (true, _) => {
            Err(Failure::invalid(format_args!("begin is null, and is said to have room for {room} items")))
        }
        // SAFETY: the caller's promise.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts_mut(begin, room) }),
    }
}

fn number(item: u64) -> ItemId {
    ItemId::new(usize::try_from(item).unwrap_or(usize::MAX))
}
