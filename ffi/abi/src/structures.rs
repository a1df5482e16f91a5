//! What calls fill or read.

use std::ffi::c_void;

/// A live block.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Where it begins.
    pub base: *mut c_void,
    /// How long it is: the request rounded up to 512 bytes.
    pub size: u64,
    /// What was asked for.
    pub requested: u64,
    /// Whose memory it is.
    pub device: i32,
}

/// A mapped range of addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Where it begins.
    pub address: u64,
    /// How long it is.
    pub size: u64,
    /// The stream of its first block that belongs to one.
    pub stream: *mut c_void,
    /// The private pool that it belongs to; 0 and 0: none.
    pub pool_first: u64,
    /// The second number of that pool.
    pub pool_second: u64,
    /// Whose memory it is.
    pub device: i32,
    /// Whether it holds requests above 1 MiB.
    pub large: bool,
    /// A second view of memory that other segments count: it reserves nothing.
    pub stitched: bool,
}

/// A part of a segment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SegmentBlock {
    /// Where it begins.
    pub address: u64,
    /// How long it is.
    pub size: u64,
    /// What was asked for; 0 where it is free.
    pub requested: u64,
    /// Handed out.
    pub live: bool,
    /// Freed, and still in use by other streams.
    pub pending: bool,
}

/// Bytes of a block, counted from its start.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ByteRange {
    /// The first.
    pub start: u64,
    /// The one behind the last.
    pub end: u64,
}

/// One copy of a list.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyBlock {
    /// Where the bytes go.
    pub to: *mut c_void,
    /// Where they come from.
    pub from: *const c_void,
    /// How many.
    pub size: usize,
}

/// Bytes that a pass saves.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Pack {
    /// How many they are.
    pub size: u64,
    /// How many of them go over a link, where fewer give back exactly the same; 0: all.
    pub link_size: u64,
    /// The layer that saves them, by a number that the pass gives to one run of it; below 0: none.
    pub scope: i64,
    /// What they are to a leaf of that layer, which can be computed again: 1 its output; 2 saved beside the output that was told before
    /// them, and not stored where that is not; 0 nothing.
    pub leaf: u8,
    /// The stream that makes them.
    pub stream: *mut c_void,
}

/// Which blocks of a private pool were live at some time; the library's alone to look into.
#[derive(Debug)]
pub struct Checkpoint(());
