//! Configuration keys of the GPU pool.

use std::fmt;
use std::str::FromStr;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

use super::knob::{MAPPABLE, SIZE, SWITCH, is_mappable, knobs};

knobs! {
    /// Configuration of a GPU's pool: extents, stitching, sharing and limits.
    Pool as pool {
        [pool]
        /// Full size of an extent, the unit of mapping, lending and release.
        ///
        /// A pool of 16 GiB or more grows by extents of this size and multiples of it. A smaller pool grows by a smaller unit in proportion
        /// to its size, at least 2 MiB: small pools waste little, large pools need few extents.
        ///
        /// The cost of a mapping depends on the number of extents, not on bytes. Larger: fewer mappings, coarser stitching. 32MiB costs up
        /// to half a point of utilization for 20 to 40 % fewer mappings; 8MiB gains up to half a point for 50 % more mappings (one-stream
        /// traces, `glake replay --extent`). With one extent per device, no memory could be lent or released.
        extent: Bytes = Bytes::mib(16), MAPPABLE, if is_mappable;
        /// Whether scattered free memory is stitched into one address range.
        ///
        /// False: no memory has a second address, and fragmentation is that of a caching allocator. Use it to measure the gain of
        /// stitching.
        alias: bool = true, SWITCH;
        /// Size below which free blocks are never stitched.
        ///
        /// Absent or 0: one unit of growth, which allows all stitching; with several streams, one extent. A size above the device's memory
        /// disables stitching. Raise it if the log shows many stitches of small blocks.
        fragment_limit: Option<Bytes> = None, SIZE, absent "one unit of growth, with several streams one extent" as "16MiB";
        /// Ratio limit for reusing an idle alias: its size is at most this many times the request.
        ///
        /// Below 1 (also 0) idle aliases are not reused; `inf` allows any size. Lower it to keep idle aliases for requests of their own
        /// size.
        reuse_limit: f64 = 10.0, "a number from 0 on, or inf", if |times| *times >= 0.0;
        /// Time of stitching: 0 before growing, 1 only if the pool cannot grow.
        ///
        /// 1 needs fewer mappings and more memory.
        defragment_level: DefragmentLevel = DefragmentLevel::Eager, "0 or 1";
        /// Limit of the address space of idle aliases; above it the oldest are collected.
        ///
        /// Rarely reached: an idle alias holds addresses and mappings, but no memory of its own. 0 drops an alias as soon as it is idle;
        /// with a very large size only the limit of mappings and trimming collect aliases. Lower it if mappings accumulate over a long run.
        auto_gc_limit: Bytes = Bytes::gib(1000), SIZE;
        /// Maximum physical memory of the pool.
        ///
        /// 0: every allocation fails. Use it if several processes share a GPU.
        limit: Option<Bytes> = None, SIZE, absent "the device's memory" as "139GiB";
        /// Whether the pool's memory can be shared with other processes: torch.multiprocessing, `glake_share`.
        ///
        /// False: sharing a block is an error that names this key. True has no effect if the driver has no file descriptors for memory
        /// (WSL2). False saves one file descriptor per extent on the simulated device.
        exportable: bool = true, SWITCH;
        /// Whether all other visible GPUs can access the pool's memory from the start.
        ///
        /// False: a peer gets access when torch requests it, at the first copy between two GPUs. Set it to true under the plain ABI of
        /// pluggable allocators, which has no such request, if tensors go from GPU to GPU. It costs a context on every visible GPU, and
        /// mapping an extent for four GPUs takes about 2.7 times as long as for one.
        peer_access: bool = false, SWITCH;
        /// Memory that a stream may take from another stream: none, completed frees, or all frees behind a wait on the GPU.
        ///
        /// `off`: streams never share. `wait`: for programs that record every use of a block on other streams and post no spinning receive,
        /// see SEMANTICS.
        borrow: Borrow = Borrow::Completed, "\"off\", \"completed\" or \"wait\"";
        /// Minimum time between two completion points while frees are pending.
        ///
        /// One every 0.5 ms did not slow down a stream of small kernels in measurements. 0 records one at every miss, a very large number
        /// only if memory has run out. Lower it to give memory to other streams sooner, at 0.14 us of driver time each.
        completion_interval_us: u64 = 500, "a whole number of microseconds";

        @constants
        /// Smallest size of an extent: of small pools, and of every pool above 90 % of the device's memory, or above 25 % of a limit
        /// that is below it. At most `pool.extent`.
        extent_near_limit: Bytes = Bytes::mib(2);
    }
}

/// Policy for reusing memory that another stream freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Borrow {
    /// No reuse across streams.
    Off,
    /// Reuse of blocks whose completion point has passed: all work enqueued before the free is done. No waits and no deadlock. Safe also
    /// for programs that free a block on the host while another stream still reads it.
    #[default]
    Completed,
    /// Also reuse of blocks whose completion point has not passed, behind a wait on the GPU. For programs that record every use of a block
    /// on another stream and post no spinning receive.
    Wait,
}

/// Time at which free memory is stitched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub enum DefragmentLevel {
    /// Stitch as soon as the free memory is sufficient.
    #[default]
    Eager,
    /// Stitch only if the pool cannot grow.
    WhenFull,
}

impl Pool {}

/// Error: the text is not a [`Borrow`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a way to borrow: write off, completed or wait")]
pub struct BorrowError {
    /// Rejected text.
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
