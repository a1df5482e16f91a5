//! Prices of driver calls for the simulator, measured on a real driver.
//!
//! Measured on an H200 with driver 580.159; each number names its measurement.

use std::time::Duration;

use super::spans::Span;
use crate::Verb;

/// Prices of calls, in nanoseconds. A price per extent is multiplied by the extents in a call's range; for memory mapped for several GPUs,
/// it grows with each GPU after the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostTable {
    /// Price of `reserve`: half of "reserve+free 6 us" of one 64 MiB block.
    pub reserve: u64,
    /// Price of `unreserve`: the other half.
    pub unreserve: u64,
    /// Price of `create` per extent: 6.8 / 6.3 / 6.7 us at 2 / 16 / 32 MiB.
    pub create: u64,
    /// Price of `map` per extent: 0.8 / 0.4 / 0.35 us at 2 / 16 / 32 MiB.
    pub map: u64,
    /// Price of `set_access` per extent for one GPU: 26-29 us.
    pub access: u64,
    /// Price of `set_access` per extent for each further GPU: four GPUs take 70-74 us, so 15 us more each.
    pub access_further: u64,
    /// Price of `unmap` per extent that one GPU may access: 10-19 us.
    pub unmap: u64,
    /// Price of `unmap` per extent for each further GPU that may access it: four GPUs take 63-67 us, so 17 us more each.
    pub unmap_further: u64,
    /// Price of `release` per extent: 11-20 us.
    pub release: u64,
    /// Price of `event_record`: 0.15 us. Queries are assumed to cost the same; they were not measured.
    pub event_record: u64,
    /// Price of `event_record_context`: 0.14 us with 8 streams.
    pub event_record_context: u64,
    /// Price of `stream_wait_event`: 0.12 us.
    pub stream_wait_event: u64,
    /// Price of `copy`, `fill` and `copy_batch`: 1.3 us to issue an asynchronous copy.
    pub copy: u64,
    /// Price of `read_now` and `write_now`: 7.0 us for 4 KiB copied and waited for, without the time on the link.
    pub copy_now: u64,
    /// Price of `export`: 1 ms the first time.
    pub export: u64,
    /// Price of `import`: 30 us.
    pub import: u64,
}

impl CostTable {
    /// Prices measured on an H200.
    pub const H200: CostTable = CostTable {
        reserve: 3_000,
        unreserve: 3_000,
        create: 6_500,
        map: 400,
        access: 27_000,
        access_further: 15_000,
        unmap: 14_000,
        unmap_further: 17_000,
        release: 14_000,
        event_record: 150,
        event_record_context: 140,
        stream_wait_event: 120,
        copy: 1_300,
        copy_now: 7_000,
        export: 1_000_000,
        import: 30_000,
    };

    /// Returns the price of one call. Verbs that were not measured are free.
    pub(super) fn price(&self, verb: Verb, span: Span) -> Duration {
        let Span { extents, gpus } = span;
        let nanoseconds = match verb {
            Verb::Reserve => self.reserve,
            Verb::Unreserve => self.unreserve,
            Verb::Create => self.create,
            Verb::Map => self.map,
            Verb::SetAccess => extents * self.access + gpus.saturating_sub(extents) * self.access_further,
            Verb::Unmap => extents * self.unmap + gpus.saturating_sub(extents) * self.unmap_further,
            Verb::Release => self.release,
            Verb::EventRecord | Verb::EventQuery => self.event_record,
            Verb::EventRecordContext => self.event_record_context,
            Verb::StreamWaitEvent => self.stream_wait_event,
            Verb::Copy | Verb::CopyBetween | Verb::CopyBatch | Verb::Fill => self.copy,
            Verb::ReadNow | Verb::WriteNow => self.copy_now,
            Verb::Export => self.export,
            Verb::Import => self.import,
            _ => 0,
        };
        Duration::from_nanos(nanoseconds)
    }
}
