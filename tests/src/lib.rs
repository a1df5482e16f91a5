//! Scenarios over the public API.
