//! Scenarios over the public API: one binary, because each costs seconds to build.

mod arrows;
mod baselines;
mod conformance_cuda;
mod conformance_sim;
mod pool_checkpoints;
mod pool_cycles;
mod pool_devices;
mod pool_faults;
mod pool_holds;
mod pool_lease;
mod pool_metrics;
mod pool_plain;
mod pool_programs;
mod pool_queries;
mod pool_sizes;
mod pool_streams;
mod pool_threads;
mod pool_ticker;
mod pool_uses;
mod region_links;
mod replay;
mod transfer_order;
