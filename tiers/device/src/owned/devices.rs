//! Sets of devices as bit masks.

use crate::DeviceId;

/// A set of devices with ids below 64, more than any server has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceSet(u64);

impl DeviceSet {
    /// The empty set of devices.
    pub const EMPTY: DeviceSet = DeviceSet(0);
    /// The set of all 64 devices.
    pub const ALL: DeviceSet = DeviceSet(u64::MAX);

    /// Returns the set of one device; empty if its id is above 63.
    pub const fn of(device: DeviceId) -> DeviceSet {
        if device.0 < 64 { DeviceSet(1 << device.0) } else { DeviceSet(0) }
    }

    /// Returns the union of both sets.
    pub const fn union(self, other: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 | other.0)
    }

    /// Returns the intersection of both sets.
    pub const fn intersection(self, other: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 & other.0)
    }

    /// Returns the devices that are not in `other`.
    pub const fn without(self, other: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 & !other.0)
    }

    /// Returns whether the set contains the device.
    pub const fn contains(self, device: DeviceId) -> bool {
        device.0 < 64 && self.0 >> device.0 & 1 == 1
    }

    /// Returns whether `other` contains every device of this set.
    pub const fn is_subset(self, other: DeviceSet) -> bool {
        self.0 & !other.0 == 0
    }

    /// Returns whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the set as bits, one per device, for atomics.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns the set with these bits ([`DeviceSet::bits`]).
    pub const fn from_bits(bits: u64) -> DeviceSet {
        DeviceSet(bits)
    }

    /// Returns the number of devices.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Iterates over the devices in ascending order.
    pub fn iter(self) -> impl Iterator<Item = DeviceId> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let device = DeviceId(left.trailing_zeros());
            // Clears the lowest bit; an empty set has none.
            left &= left.checked_sub(1)?;
            Some(device)
        })
    }
}

impl FromIterator<DeviceId> for DeviceSet {
    fn from_iter<I: IntoIterator<Item = DeviceId>>(devices: I) -> DeviceSet {
        devices.into_iter().fold(DeviceSet::EMPTY, |set, device| set.union(DeviceSet::of(device)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_operations() {
        let set: DeviceSet = [DeviceId(3), DeviceId(0), DeviceId(3), DeviceId(99)].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [DeviceId(0), DeviceId(3)]);
        assert!(DeviceSet::of(DeviceId(3)).is_subset(set) && !set.is_subset(DeviceSet::of(DeviceId(3))));
        assert_eq!(set.without(DeviceSet::of(DeviceId(0))), DeviceSet::of(DeviceId(3)));
        assert!(!set.contains(DeviceId(99)) && DeviceSet::of(DeviceId(64)).is_empty());
        assert_eq!((set.len(), DeviceSet::ALL.iter().count(), DeviceSet::EMPTY.iter().count()), (2, 64, 0));
        assert_eq!(DeviceSet::from_bits(set.bits()), set);
        assert_eq!(set.intersection(DeviceSet::of(DeviceId(3))), DeviceSet::of(DeviceId(3)));
    }
}
