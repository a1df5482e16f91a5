//! The files of this folder as texts: what a user can set and its defaults, presets, and models of servers.
//!
//! Everything else that reads them asks here, so that no crate reads files outside its folder.

/// Every key with its default, its unit and its range.
pub const DEFAULT: &str = include_str!("default.toml");
/// Settings for workers that come and go.
pub const SERVERLESS: &str = include_str!("serverless.toml");

/// Models of published servers, by name.
pub const TOPOLOGIES: &[(&str, &str)] = &[
    ("h200x4", include_str!("topologies/h200x4.toml")),
    ("h20x8", include_str!("topologies/h20x8.toml")),
    ("a100x8", include_str!("topologies/a100x8.toml")),
    ("h200x4-direct", include_str!("topologies/h200x4-direct.toml")),
    ("pcie4x4", include_str!("topologies/pcie4x4.toml")),
];
