//! The knobs of the GPU pool.

use std::fmt;
use std::str::FromStr;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

/// How the pool of a GPU cuts, stitches, shares and limits memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pool {
    /// The unit of mapping, lending and release; a multiple of 2 MiB, CUDA's granularity.
    ///
    /// Default 16 MiB: a mapping costs by the extent and not by the byte, and on traces of training larger ones
    /// reserve one to two points more, 2 MiB ones a point less. 0 is refused; infinity would be one extent a
    /// device, which nothing can be lent from.
    pub extent: Bytes,
    /// The extent size once growing by [`Pool::extent`] would pass the limit; never more than `extent`.
    ///
    /// Default 2 MiB, so that the last bytes below a limit can be had. The same value as `extent` turns the finer
    /// step off. 0 is refused.
    pub extent_near_limit: Bytes,
    /// The size of a slab, which serves requests up to 1 MiB of one stream; a multiple of 2 MiB.
    ///
    /// Default 2 MiB, as torch's small pool. 0 is refused; a large value keeps memory for small blocks only.
    pub slab: Bytes,
    /// Whether free memory that does not lie together is stitched (`vmmDefragment`).
    ///
    /// Default true. False: no second address for any byte, and fragmentation as in a caching allocator.
    pub alias: bool,
    /// Free blocks below this are never stitched (`fragment_limit`, `fragLimit`).
    ///
    /// Absent: one extent, the least that can be lent, so that nothing is held back. 0 says the same; infinity
    /// (any size above the device's memory) stitches nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fragment_limit: Option<Bytes>,
    /// An idle alias serves a request if its size is at most this many times the request (`reuseLimit`).
    ///
    /// Default 10. Below 1 (0 too) no idle alias is used again; `inf` takes one of any size.
    pub reuse_limit: f64,
    /// When to stitch (`defragment_level`, `defragLevel`).
    ///
    /// Default 0: as soon as free memory is enough. 1: only when growing is not possible.
    pub defragment_level: DefragmentLevel,
    /// Idle aliases above this much of mappings are collected, oldest first (`auto_gc_limits`, `autoGC`).
    ///
    /// Default 1000 GiB, seldom reached: an idle alias holds addresses and mappings but no memory of its own. 0
    /// drops an alias as soon as it is idle; infinity (any huge size) leaves collection to `max_mappings` and to
    /// trimming.
    pub auto_gc_limit: Bytes,
    /// How many mappings may live at once on a device; idle aliases are dropped to stay below, then stitching
    /// stops.
    ///
    /// Default 262144, half of what one context of an H200 held before the driver itself ran out of memory. The
    /// pool takes less where the device bears less (the simulator: the kernel's `vm.max_map_count`). 0 is refused:
    /// memory at home is mapped too. Infinity (any huge number) leaves it to the device.
    pub max_mappings: u64,
    /// The part of the device's memory that the pool may reserve, 0 to 1.
    ///
    /// Default 1. 0: nothing can be allocated. Together with `limit` the lower of the two holds.
    pub memory_fraction: f64,
    /// The most memory that the pool may reserve.
    ///
    /// Absent (the same as infinity): the device's memory. 0: nothing can be allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<Bytes>,
    /// Whether other processes can be given the pool's memory: torch.multiprocessing, `glake_share`.
    ///
    /// Default true. False: sharing a block is an error that names this knob. On the simulated device every extent takes a
    /// file descriptor then.
    pub exportable: bool,
    /// Whether work of every other visible GPU may touch the pool's memory from the start.
    ///
    /// Default false: torch asks for it when it first copies between two GPUs, where it can (not under the plain ABI of
    /// pluggable allocators). True: a context on every visible GPU, and each mapping costs more by the number of GPUs.
    pub peer_access: bool,
    /// What a stream may take from another.
    pub borrow: Borrow,
    /// How blocks are chosen under [`Borrow::Wait`], and how often completion is recorded.
    pub wait: Wait,
}

/// What a stream may take of what another stream freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Borrow {
    /// Nothing.
    Off,
    /// Blocks whose epoch has passed: all work enqueued before the free is done. No waits, no deadlock; right for
    /// programs too that free a block on the host while another stream still reads it.
    #[default]
    Completed,
    /// Also blocks whose epoch has not passed, behind a wait on the GPU: for programs that record every use of a
    /// block on another stream and post no receive that spins.
    Wait,
}

/// When free memory is stitched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub enum DefragmentLevel {
    /// As soon as the free memory is enough.
    #[default]
    Eager,
    /// Only when growing is not possible.
    WhenFull,
}

/// The rules for blocks that are borrowed behind a wait; only `epoch_interval_us` matters without one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wait {
    /// Borrow the block that was freed longest ago, and not the one that fits best.
    ///
    /// Default false: best fit wastes less; the oldest block's wait is the shortest.
    pub oldest_first: bool,
    /// Whether a borrowed block may be split.
    ///
    /// Default true. False: a borrower takes whole blocks.
    pub split: bool,
    /// Whether a borrowed block may be part of an alias.
    ///
    /// Default true. False: only blocks that need no wait are stitched.
    pub stitch: bool,
    /// How much larger than the request a borrowed block may be.
    ///
    /// Absent: infinite. 0: only a block of exactly the size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_excess: Option<Bytes>,
    /// The least time between two epochs, in microseconds, while there are frees to cover.
    ///
    /// Default 500: recording one every 0.5 ms was not seen to slow a stream of small kernels. 0 records one at
    /// every chance; infinity (any huge number) only when memory has run out.
    pub epoch_interval_us: u64,
}

impl Pool {
    /// [`Pool::fragment_limit`], or one extent where it is absent.
    pub fn fragment_limit(&self) -> Bytes {
        self.fragment_limit.unwrap_or(self.extent)
    }
}

impl Default for Pool {
    fn default() -> Self {
        Pool {
            extent: Bytes::mib(16),
            extent_near_limit: Bytes::mib(2),
            slab: Bytes::mib(2),
            alias: true,
            fragment_limit: None,
            reuse_limit: 10.0,
            defragment_level: DefragmentLevel::Eager,
            auto_gc_limit: Bytes::gib(1000),
            max_mappings: 1 << 18,
            memory_fraction: 1.0,
            limit: None,
            exportable: true,
            peer_access: false,
            borrow: Borrow::Completed,
            wait: Wait::default(),
        }
    }
}

impl Default for Wait {
    fn default() -> Self {
        Wait { oldest_first: false, split: true, stitch: true, max_excess: None, epoch_interval_us: 500 }
    }
}

/// Text that is not a [`Borrow`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a way to borrow: write off, completed or wait")]
pub struct BorrowError {
    /// What was given.
    pub text: String,
}

impl FromStr for Borrow {
    type Err = BorrowError;

    fn from_str(text: &str) -> Result<Self, BorrowError> {
        match text {
            "off" => Ok(Borrow::Off),
            "completed" => Ok(Borrow::Completed),
            "wait" => Ok(Borrow::Wait),
            _ => Err(BorrowError { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for Borrow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Borrow::Off => "off",
            Borrow::Completed => "completed",
            Borrow::Wait => "wait",
        })
    }
}

impl TryFrom<u64> for DefragmentLevel {
    type Error = &'static str;

    fn try_from(level: u64) -> Result<Self, &'static str> {
        match level {
            0 => Ok(DefragmentLevel::Eager),
            1 => Ok(DefragmentLevel::WhenFull),
            _ => Err("0 or 1"),
        }
    }
}

impl From<DefragmentLevel> for u64 {
    fn from(level: DefragmentLevel) -> u64 {
        match level {
            DefragmentLevel::Eager => 0,
            DefragmentLevel::WhenFull => 1,
        }
    }
}
