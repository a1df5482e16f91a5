//! Owners of extents, and the lanes of their free pieces.

use slab::Slab;
use smallvec::SmallVec;

use crate::ids::{AliasId, DomainId, Epoch, LaneId, StreamKey};
use crate::lane::{Class, Lane, Taker};
use crate::piece::Pieces;

/// What a domain allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DomainOptions {
    /// Whether its free pieces may be stitched.
    pub alias: bool,
    /// Whether a stream may take what another freed, once that has passed.
    pub lend: bool,
    /// The size of its extents; `None`: the device's.
    pub extent: Option<glake_units::Bytes>,
    /// Whether its free extents stay its own until it is released, or trimmed by name.
    pub keep: bool,
}

impl Default for DomainOptions {
    fn default() -> Self {
        DomainOptions { alias: true, lend: true, extent: None, keep: false }
    }
}

impl DomainOptions {
    /// Memory for a part of a program: stitched and lent among its own streams, and kept until it is released.
    pub fn own_pool() -> Self {
        DomainOptions { keep: true, ..DomainOptions::default() }
    }

    /// The private pool of a CUDA graph: addresses are baked into graphs, so that nothing is lent, and free memory stays,
    /// because a replay writes to it.
    pub fn private_pool() -> Self {
        DomainOptions { alias: false, lend: false, extent: None, keep: true }
    }

    /// Memory that leaves its GPU and comes back as a whole: like the default domain, in extents so large that mapping them
    /// takes no time beside copying them.
    pub fn region(extent: glake_units::Bytes) -> Self {
        DomainOptions { extent: Some(extent), ..DomainOptions::default() }
    }

    /// Whether addresses and bytes are a captured graph's, those of free memory too.
    pub fn is_private(&self) -> bool {
        self.keep && !self.alias && !self.lend
    }
}

/// So many streams of a domain are kept, whatever they have.
pub(crate) const MANY: usize = 16;

/// The lanes of one stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamLanes {
    pub(crate) stream: StreamKey,
    pub(crate) large: LaneId,
    pub(crate) slabs: LaneId,
    pub(crate) small: LaneId,
}

/// What a hit looks at comes first, in two cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Domain {
    pub(crate) id: DomainId,
    /// When its owner gave it up: what was free then goes back to the driver once that has passed, for a graph may still write to it.
    pub(crate) released: Option<Epoch>,
    /// What is in it is not written to, so nothing new is handed out.
    pub(crate) sealed: bool,
    /// Large pieces and slabs that anyone may take.
    pub(crate) passed_large: LaneId,
    pub(crate) passed_slabs: LaneId,
    pub(crate) aliases: Vec<AliasId>,
    pub(crate) streams: SmallVec<[StreamLanes; 4]>,
    pub(crate) options: DomainOptions,
    /// Where there are more streams than this, those that have nothing any more are forgotten.
    pub(crate) most_streams: usize,
    /// Pieces that nobody may take yet.
    pub(crate) limbo_large: LaneId,
    pub(crate) limbo_small: LaneId,
    /// Free pieces of extents that are not here.
    pub(crate) away_large: LaneId,
    pub(crate) away_small: LaneId,
    /// Plans for blocks of it that are neither committed nor aborted.
    pub(crate) plans: usize,
    pub(crate) extents: usize,
}

impl Domain {
    pub(crate) fn new(id: DomainId, options: DomainOptions, lanes: &mut Slab<Lane>) -> Self {
        let mut lane = |class, taker| add(lanes, Lane::new(id, class, taker));
        Domain {
            id,
            options,
            streams: SmallVec::new(),
            most_streams: MANY,
            passed_large: lane(Class::Large, Taker::Anyone),
            passed_slabs: lane(Class::Slabs, Taker::Anyone),
            limbo_large: lane(Class::Large, Taker::Nobody),
            limbo_small: lane(Class::Small, Taker::Nobody),
            away_large: lane(Class::Large, Taker::Away),
            away_small: lane(Class::Small, Taker::Away),
            aliases: Vec::new(),
            released: None,
            plans: 0,
            sealed: false,
            extents: 0,
        }
    }

    pub(crate) fn is_released(&self) -> bool {
        self.released.is_some()
    }

    /// The lanes of a stream that was seen before.
    pub(crate) fn lanes_of(&self, stream: StreamKey) -> Option<StreamLanes> {
        self.streams.iter().find(|lanes| lanes.stream == stream).copied()
    }

    /// The lanes of a stream, made at first sight.
    pub(crate) fn add_stream(
        &mut self,
        id: DomainId,
        stream: StreamKey,
        lanes: &mut Slab<Lane>,
        pieces: &Pieces,
    ) -> StreamLanes {
        let mut lane = |class| add(lanes, Lane::new(id, class, Taker::Stream(stream)));
        let own = StreamLanes {
            stream,
            large: lane(Class::Large),
            slabs: lane(Class::Slabs),
            small: lane(Class::Small),
        };
        self.streams.push(own);
        if self.streams.len() > 1 && self.options.lend {
            for own in self.streams.iter().flat_map(|own| [own.large, own.slabs]) {
                lanes[own.index()].keep_ages(pieces);
            }
        }
        own
    }

    /// Every lane.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = LaneId> + '_ {
        let small = self.streams.iter().map(|lanes| lanes.small);
        let apart = [self.limbo_large, self.limbo_small, self.away_large, self.away_small];
        self.home_lanes().chain(apart).chain(small)
    }

    /// Every lane that holds whole pieces of home.
    pub(crate) fn home_lanes(&self) -> impl Iterator<Item = LaneId> + '_ {
        [self.passed_large, self.passed_slabs]
            .into_iter()
            .chain(self.streams.iter().flat_map(|lanes| [lanes.large, lanes.slabs]))
    }
}

fn add(lanes: &mut Slab<Lane>, lane: Lane) -> LaneId {
    LaneId::at(lanes.insert(lane))
}
