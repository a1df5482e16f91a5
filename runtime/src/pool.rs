//! Conversion of the configuration to the options of a pool.

use glake_device::DeviceInfo;
use glake_stitch::{Borrow, Settings};
use glake_tiers::PoolOptions;
use glake_units::Bytes;

use crate::config;

/// Maximum number of live mappings per device: half of what one context of an H200 held (523,367) before the driver ran out of memory.
const MAX_MAPPINGS: u64 = 1 << 18;

/// Returns the options for the pool of one device among the `visible` ones; `mappings` is its maximum number of mappings.
pub fn options(
    pool: &config::Pool,
    device: &DeviceInfo,
    visible: &[DeviceInfo],
    mappings: u64,
) -> PoolOptions {
    let others = visible.iter().map(|info| info.id).filter(|id| pool.peer_access && *id != device.id);
    PoolOptions {
        settings: Some(settings(pool, device.memory, mappings)),
        peers: others.collect(),
        exportable: pool.exportable,
        ..PoolOptions::default()
    }
}

/// Returns the settings of a pool on a device with `memory` bytes and at most `mappings` live mappings.
///
/// Every key of the pool is read here only; settings without a key keep the core's default.
pub fn settings(pool: &config::Pool, memory: Bytes, mappings: u64) -> Settings {
    Settings {
        extent: pool.extent,
        extent_near_limit: pool.extent_near_limit.min(pool.extent),
        alias: pool.alias,
        fragment_limit: pool.fragment_limit,
        reuse_limit: pool.reuse_limit,
        stitch_only_when_full: pool.defragment_level == config::DefragmentLevel::WhenFull,
        idle_aliases: pool.auto_gc_limit,
        max_mappings: MAX_MAPPINGS.min(mappings),
        limit: memory.min(pool.limit.unwrap_or(Bytes::MAX)),
        borrow: borrow(pool),
        ..Settings::for_memory(memory)
    }
}

fn borrow(pool: &config::Pool) -> Borrow {
    match pool.borrow {
        config::Borrow::Off => Borrow::Off,
        config::Borrow::Completed => Borrow::Completed,
        config::Borrow::Wait => Borrow::Wait,
    }
}

/// Returns a fraction of the memory, rounded down.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
pub(crate) fn part(memory: Bytes, fraction: f64) -> Bytes {
    if fraction >= 1.0 { memory } else { Bytes::new((memory.get() as f64 * fraction.max(0.0)) as u64) }
}

#[cfg(test)]
mod tests {
    use glake_device::DeviceId;

    use super::*;
    use crate::config::Pool;

    #[test]
    fn the_defaults_are_the_core_s() {
        let memory = Bytes::gib(80);
        let core = Settings::for_memory(memory);
        let converted = settings(&Pool::default(), memory, u64::MAX);
        assert_eq!(Settings { max_mappings: core.max_mappings, ..converted }, core);
    }

    #[test]
    fn peers_are_all_others_or_none() {
        let info = |id| DeviceInfo {
            id: DeviceId(id),
            name: String::new(),
            memory: Bytes::gib(80),
            pci: None,
            exportable: true,
            gpu_direct: true,
        };
        let visible = [info(0), info(1), info(2)];
        let of = |pool: Pool| options(&pool, &visible[1], &visible, 1000);
        let (alone, open) = (of(Pool::default()), of(Pool { peer_access: true, ..Pool::default() }));
        assert!(alone.peers.is_empty() && alone.exportable);
        assert_eq!(open.peers, [DeviceId(0), DeviceId(2)]);
        assert!(!of(Pool { exportable: false, ..Pool::default() }).exportable);
        assert_eq!(open.settings.map(|settings| settings.memory), Some(Bytes::gib(80)));
    }

    #[test]
    fn the_lowest_limit_holds() {
        let of = |limit| settings(&Pool { limit, ..Pool::default() }, Bytes::gib(80), 1000);
        assert_eq!(of(Some(Bytes::gib(60))).limit, Bytes::gib(60));
        assert_eq!(of(Some(Bytes::gib(100))).limit, Bytes::gib(80));
        assert_eq!(of(Some(Bytes::ZERO)).limit, Bytes::ZERO);
        assert_eq!(of(None).max_mappings, 1000);
        assert_eq!((part(Bytes::gib(80), 0.5), part(Bytes::gib(80), 0.0)), (Bytes::gib(40), Bytes::ZERO));
    }
}
