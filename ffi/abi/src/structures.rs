//! Structures that calls fill or read.

use std::ffi::c_void;

/// A live block of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Address of its first byte.
    pub base: *mut c_void,
    /// Size in bytes, which is the request rounded up to 512.
    pub size: u64,
    /// Requested size in bytes.
    pub requested: u64,
    /// Device of the memory.
    pub device: i32,
}

/// A mapped range of addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Address of its first byte.
    pub address: u64,
    /// Size of the range in bytes.
    pub size: u64,
    /// Stream of its first block that belongs to a stream.
    pub stream: *mut c_void,
    /// First number of its private pool; 0 and 0: no private pool.
    pub pool_first: u64,
    /// Second number of its private pool.
    pub pool_second: u64,
    /// Device of the memory.
    pub device: i32,
    /// Whether it holds requests above 1 MiB.
    pub large: bool,
    /// Whether it is a second mapping of memory that other segments count: it reserves none.
    pub stitched: bool,
}

/// A part of a segment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SegmentBlock {
    /// Address of its first byte.
    pub address: u64,
    /// Size of the part in bytes.
    pub size: u64,
    /// Requested size in bytes; 0 if free.
    pub requested: u64,
    /// Whether it belongs to a live block.
    pub live: bool,
    /// Whether it is freed but still in use by other streams.
    pub pending: bool,
}

/// Half-open range of bytes of a block, counted from its start.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ByteRange {
    /// Offset of the first byte.
    pub start: u64,
    /// Offset behind the last byte.
    pub end: u64,
}

/// A copy in a list of copies.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyBlock {
    /// Destination of the bytes.
    pub to: *mut c_void,
    /// Source of the bytes.
    pub from: *const c_void,
    /// Number of bytes to copy.
    pub size: usize,
}

/// Bytes that a pass saves.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Pack {
    /// Number of bytes to save.
    pub size: u64,
    /// Number of bytes to transfer, if fewer restore exactly the same content; 0: all.
    pub link_size: u64,
    /// Number of the layer that saves the bytes, chosen by the pass for one run of the layer; negative: none.
    pub scope: i64,
    /// Role in a recomputable leaf of the layer: 1 its output; 2 saved beside the output reported before, and not stored if that is not; 0
    /// none.
    pub leaf: u8,
    /// Stream that produces the bytes.
    pub stream: *mut c_void,
}

/// Opaque record of the blocks of a private pool that were live at one time.
#[derive(Debug)]
pub struct Checkpoint(());
