//! Keys of the configuration. One definition yields a key's field, its parser and its documentation.
//!
//! ```text
//!   knobs! { /// doc            ┌─► the field of its struct, and its default
//!            key: type = default├─► reading: its key, its kind, its range, the text of an error
//!            allowed … ; }      ├─► configs/default.toml
//!                               └─► the reference in docs/TUNING.md
//! ```
//!
//! `runtime/tests/generated.rs` writes the two files.

use glake_units::Bytes;
use toml::Value;

use super::{Agent, Config, Device, Lease, Log, Pool, Tiers, Transfer};

/// Key of the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// Full name, including its table: `pool.extent`.
    pub key: &'static str,
    /// Field of [`Config`] and field of that struct which the key sets.
    pub(super) field: (&'static str, &'static str),
    /// Description of allowed values, with their unit.
    pub allowed: &'static str,
    /// Effect of the key and reasons to change it, by line. The first empty line ends the summary.
    pub about: &'static [&'static str],
    /// For optional keys: the meaning of an absent key, and an example value.
    pub absent: Option<(&'static str, &'static str)>,
    /// Check beyond the type; called with a configuration in which only this key is set.
    pub(super) holds: fn(&Config) -> bool,
}

/// Removed keys, and the key or behavior that replaces each.
const REMOVED: &[(&str, &str)] = &[
    ("pool.memory_fraction", "set pool.limit, or call torch.cuda.set_per_process_memory_fraction"),
    (
        "transfer.relays",
        "transfer.multi_path = \"always\" replaces true, and \"never\" replaces false; remove the line for \"auto\"",
    ),
    ("tiers.park_drain_ms", "a shrink waits 2 s for the GPU work of parked uses"),
    ("tiers.park_quantum_ms", "a use runs for at least 300 ms between two parks"),
    ("tiers.suspend_relays", "relays are suspended while everything is evicted"),
    ("expert.extent_near_limit", "the smallest extent has 2 MiB; pool.extent sets the full size"),
    ("expert.slab", "a slab has 2 MiB"),
    ("expert.max_mappings", "at most 262144 mappings live at once; pool.auto_gc_limit limits idle aliases"),
    (
        "expert.break_even",
        "copies are split where the measured rates predict a gain; run glake topo --calibrate",
    ),
    (
        "expert.relay_slots",
        "each relay stages copies in 64 MiB; transfer.exclude lists GPUs that are no relays",
    ),
    ("expert", "remove the section: its keys have become constants"),
    ("expert.copy_streams", "8 streams can copy over several links at a time"),
    ("expert.host_arena", "256 MiB of host memory are pinned at once; tiers.host_budget limits the sum"),
];

pub(super) const SWITCH: &str = "true or false";
pub(super) const SIZE: &str = "a size: bytes, or a number and a unit such as \"512MiB\" or \"32GiB\"";
pub(super) const MAPPABLE: &str = "a multiple of 2MiB above 0, such as \"16MiB\"";
pub(super) const FOLDER: &str = "the path of a folder";
const UNITS: [(i64, &str); 3] = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
/// Granularity of CUDA mappings: sizes that can be mapped are multiples of it.
pub(super) const GRANULARITY: Bytes = Bytes::mib(2);

/// Defines a struct of keys: `[table] /// doc  field: type = default, allowed[, if check][, absent "meaning" as value];`, and then, after
/// `@constants`, fields without a key: `/// doc  field: type = value;`. Only tests change constants.
macro_rules! knobs {
    (
        $(#[doc = $of:literal])*
        $name:ident as $section:ident {
            $([$table:ident] $(
                $(#[doc = $doc:literal])*
                $field:ident: $type:ty = $default:expr, $allowed:expr
                $(, if $holds:expr)? $(, absent $absent:literal as $shown:literal)?;
            )*)+
            $(@constants $(
                $(#[doc = $constant_doc:literal])*
                $constant:ident: $constant_type:ty = $value:expr;
            )*)?
        }
    ) => {
        $(#[doc = $of])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(
                $(#[doc = $doc])*
                #[doc = concat!("\n\nIts key is `", stringify!($table), ".", stringify!($field), "`.")]
                $(
                    #[doc = concat!("\n\nAbsent: ", $absent, ".")]
                    #[serde(skip_serializing_if = "Option::is_none")]
                )?
                pub $field: $type,
            )*)+
            $($(
                $(#[doc = $constant_doc])*
                #[serde(skip)]
                pub $constant: $constant_type,
            )*)?
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($($field: $default,)*)+ $($($constant: $value,)*)? }
            }
        }

        impl $name {
            /// Keys of the section.
            pub(super) const KNOBS: &[$crate::config::Knob] = &[$($($crate::config::Knob {
                key: concat!(stringify!($table), ".", stringify!($field)),
                field: (stringify!($section), stringify!($field)),
                allowed: $allowed,
                about: &[$($doc),*],
                absent: [$(Some(($absent, stringify!($shown))),)? None][0],
                holds: |_config| true $(&& {
                    let holds: fn(&$type) -> bool = $holds;
                    holds(&_config.$section.$field)
                })?,
            },)*)+];
        }
    };
}
pub(super) use knobs;

impl Knob {
    /// Returns all keys, table by table.
    pub fn all() -> impl Iterator<Item = &'static Knob> {
        let sections = [
            Pool::KNOBS,
            Transfer::KNOBS,
            Tiers::KNOBS,
            Lease::KNOBS,
            Agent::KNOBS,
            Device::KNOBS,
            Log::KNOBS,
        ];
        sections.into_iter().flatten()
    }

    /// Finds a key by its full name.
    pub fn of(key: &str) -> Option<&'static Knob> {
        Knob::all().find(|knob| knob.key == key)
    }

    /// Its table, and its name there.
    pub fn name(&self) -> (&'static str, &'static str) {
        self.key.split_once('.').unwrap_or(("", self.key))
    }

    /// Its value in a configuration, as a file has it, a size with its unit; `None` where it has none there.
    pub fn value(&self, config: &Config) -> Option<Value> {
        let document = toml::Table::try_from(config).ok()?;
        let value = document.get(self.field.0)?.get(self.field.1)?;
        let size = value.as_integer().filter(|bytes| self.allowed.contains("MiB") && *bytes != 0);
        let unit =
            |bytes: i64| UNITS.into_iter().find(|(unit, _)| bytes % unit == 0).map(|found| (bytes, found));
        let size =
            size.and_then(unit).map(|(bytes, (unit, name))| Value::String(format!("{}{name}", bytes / unit)));
        Some(size.unwrap_or_else(|| value.clone()))
    }
}

impl Config {
    /// A file that sets all of it, under the keys of today.
    pub fn to_toml(&self) -> String {
        let mut document = toml::Table::new();
        for knob in Knob::all() {
            let (table, name) = knob.name();
            let table = document.entry(table).or_insert_with(|| Value::Table(toml::Table::new()));
            if let (Some(value), Value::Table(table)) = (knob.value(self), table) {
                table.insert(name.to_owned(), value);
            }
        }
        document.to_string()
    }
}

/// Whether a key is a table of knobs.
pub(super) fn is_table(key: &str) -> bool {
    Knob::all().any(|knob| knob.name().0 == key)
}

/// Returns the behavior that replaces a removed key.
pub(super) fn removed(key: &str) -> Option<&'static str> {
    REMOVED.iter().find(|(before, _)| *before == key).map(|(_, now)| *now)
}

/// Returns suggestions for an unknown key: the keys of its table, or all keys if the table does not exist.
pub(super) fn allowed_beside(key: &str) -> Vec<&'static str> {
    let table = key.rsplit_once('.').map_or("", |(table, _)| table);
    let beside = |knob: &&Knob| !is_table(table) || knob.name().0 == table;
    Knob::all().filter(beside).map(|knob| knob.key).collect()
}

#[allow(clippy::trivially_copy_pass_by_ref)]
pub(super) fn is_mappable(size: &Bytes) -> bool {
    !size.is_zero() && size.is_aligned(GRANULARITY)
}

#[cfg(test)]
mod tests {
    use super::super::Sources;
    use super::*;

    #[test]
    fn the_defaults_are_allowed_and_found_by_name() {
        let config = Config::default();
        for knob in Knob::all() {
            assert!((knob.holds)(&config), "{}", knob.key);
            assert_eq!(knob.value(&config).is_none(), knob.absent.is_some(), "{}", knob.key);
            assert_eq!(Knob::of(knob.key).map(|found| found.field), Some(knob.field), "one key, one knob");
        }
        assert_eq!(Knob::of("pool.extent").unwrap().value(&config), Some(Value::String("16MiB".to_owned())));
        assert!(Knob::all().count() <= 34, "each key must earn its place");
    }

    #[test]
    fn what_a_configuration_writes_is_read_as_the_same() {
        let text = "[pool]\nlimit = \"3GiB\"\n[transfer]\nexclude = [1, 2]\nmulti_path = \"never\"\n";
        for text in ["", text] {
            let read = |text: &str| Sources::default().with_overrides("test", text).unwrap().load().unwrap();
            let config = read(text);
            assert_eq!(read(&config.to_toml()), config);
        }
    }

    #[test]
    fn removed_keys_are_no_keys() {
        assert!(REMOVED.iter().all(|(before, _)| Knob::of(before).is_none()));
    }
}
