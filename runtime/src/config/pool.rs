//! The knobs of the GPU pool.

use std::fmt;
use std::str::FromStr;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

use super::knob::{MAPPABLE, SIZE, SWITCH, is_mappable, knobs};

knobs! {
    /// How the pool of a GPU cuts, stitches, shares and limits memory.
    Pool as pool {
        [pool]
        /// The full size of extents, the unit of mapping, lending and release.
        ///
        /// A pool of 16 GiB or more grows by extents of this size and multiples of it. A smaller one grows by a smaller unit, in
        /// proportion to what it holds, from `expert.extent_near_limit` on: a small pool takes little, a large one few extents.
        ///
        /// A mapping costs by the extent and not by the byte. Larger: fewer mappings, coarser stitching. 32MiB costs
        /// up to half a point of utilization for a fifth to two fifths fewer mappings, 8MiB gains up to half a point for
        /// half again as many (one-stream traces, `glake replay --extent`). Of one extent a device nothing could be lent or
        /// released.
        extent: Bytes = Bytes::mib(16), MAPPABLE, if is_mappable;
        /// Whether free memory that does not lie together is stitched.
        ///
        /// False: no second address for any byte, and fragmentation as in a caching allocator: to see what stitching
        /// gives.
        alias: bool = true, SWITCH;
        /// Free blocks below this are never stitched.
        ///
        /// Absent or 0: one unit of growth, so that nothing is held back. A size above the device's
        /// memory stitches nothing. Larger, if the log shows many stitches of small blocks.
        fragment_limit: Option<Bytes> = None, SIZE, absent "one unit of growth" as "16MiB";
        /// An idle alias serves a request if its size is at most this many times the request.
        ///
        /// Below 1 (0 too) no idle alias is used again; `inf` takes one of any size. Smaller, if idle aliases should
        /// wait for requests of their size.
        reuse_limit: f64 = 10.0, "a number from 0 on, or inf", if |times| *times >= 0.0;
        /// When to stitch: 0 before growing, 1 only when growing is not possible.
        ///
        /// 1 takes fewer mappings and more memory.
        defragment_level: DefragmentLevel = DefragmentLevel::Eager, "0 or 1";
        /// Idle aliases above this much of mappings are collected, oldest first.
        ///
        /// Seldom reached: an idle alias holds addresses and mappings but no memory of its own. 0 drops an alias as soon
        /// as it is idle; any huge size leaves collection to `expert.max_mappings` and to trimming. Smaller, if mappings
        /// pile up over a long run.
        auto_gc_limit: Bytes = Bytes::gib(1000), SIZE;
        /// The part of the device's memory that the pool may reserve.
        ///
        /// 0: nothing can be allocated. Together with `limit` the lower of the two holds. For several processes that
        /// share a GPU.
        memory_fraction: f64 = 1.0, "a number from 0 to 1", if |part| (0.0..=1.0).contains(part);
        /// The most memory that the pool may reserve.
        ///
        /// 0: nothing can be allocated. For several processes that share a GPU.
        limit: Option<Bytes> = None, SIZE, absent "the device's memory" as "139GiB";
        /// Whether other processes can be given the pool's memory: torch.multiprocessing, `glake_share`.
        ///
        /// False: sharing a block is an error that names this knob. True has no effect where the driver gives no file
        /// descriptors (WSL2). False, if nothing is shared and each extent should take no file descriptor on the
        /// simulated device.
        exportable: bool = true, SWITCH;
        /// Whether work of every other visible GPU may touch the pool's memory from the start.
        ///
        /// False: a peer touches memory once torch asks for it, when it first copies between two GPUs. True under the
        /// plain ABI of pluggable allocators, where torch cannot ask, if tensors go from GPU to GPU: it costs a context
        /// on every visible GPU, and mapping an extent costs about 2.7 times as much for four GPUs as for one.
        peer_access: bool = false, SWITCH;
        /// What a stream may take from another: nothing, what has surely completed, or all behind a wait on the GPU.
        ///
        /// `off`: streams never share. `wait`: programs that record every use and receive without spinning, see
        /// SEMANTICS.
        borrow: Borrow = Borrow::Completed, "\"off\", \"completed\" or \"wait\"";
        /// The least time between two completion points, while there are frees to cover.
        ///
        /// Recording one every 0.5 ms was not seen to slow a stream of small kernels. 0 records one at every miss, any
        /// huge number only when memory has run out. Smaller: other streams get memory sooner, 0.14 us of the driver
        /// each.
        completion_interval_us: u64 = 500, "a whole number of microseconds";

        [expert]
        /// The smallest size of extents: of a pool that holds little, and of all above 90 % of the device's memory, or above
        /// 25 % of a limit that is below it; of a region, once larger ones would pass the limit. At most `pool.extent`.
        ///
        /// So a small pool is small, and the last bytes below a limit can be had. The same value as `pool.extent` makes all
        /// extents that large: less driver work under a tight limit, and a little less fits.
        extent_near_limit: Bytes = Bytes::mib(2), MAPPABLE, if is_mappable;
        /// The size of a slab, which serves requests up to 1 MiB of one stream. At most `extent_near_limit`, and at most
        /// `pool.extent`.
        ///
        /// As torch's small pool. A large value keeps memory for small blocks only.
        slab: Bytes = Bytes::mib(2), MAPPABLE, if is_mappable;
        /// How many mappings may live at once on a device.
        ///
        /// The older half of the idle aliases goes at seven eighths of it; then stitching stops. The default is half of
        /// what one context of an H200 held (523,367) before the driver itself ran out of memory. The pool takes less
        /// where the device bears less (the simulator: the kernel's `vm.max_map_count`). Any huge number leaves it to
        /// the device.
        max_mappings: u64 = 1 << 18, "a whole number from 1 on", if |mappings| *mappings >= 1;
    }
}

/// What a stream may take of what another stream freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Borrow {
    /// Nothing.
    Off,
    /// Blocks whose completion point has passed: all work enqueued before the free is done. No waits, no deadlock; right for
    /// programs too that free a block on the host while another stream still reads it.
    #[default]
    Completed,
    /// Also blocks whose completion point has not passed, behind a wait on the GPU: for programs that record every use of a
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

impl Pool {}

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
