//! A block goes from one process to another: the same bytes on both sides, on a simulated GPU that both have.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::{DeviceId, Driver, Stream};
use glake_runtime::share::{Exporter, ShareError, Shared, open};
use glake_sim::{SimOptions, SimTopology, Simulator};
use glake_stitch::Settings;
use glake_tiers::{Block, GpuPool, Import, PoolOptions, PoolStream};
use glake_units::Bytes;

const GPU: DeviceId = DeviceId(0);
/// The folder through which the two processes share the GPU.
const FOLDER: &str = "GLAKE_TEST_SHARE_FOLDER";
/// Handle, offset and size of each block, a word each.
const BLOCKS: &str = "GLAKE_TEST_SHARE_BLOCKS";

fn driver(folder: &str) -> Arc<dyn Driver> {
    let mut topology = SimTopology::uniform(1, Bytes::mib(64));
    topology.gpus[0].context = Bytes::mib(2);
    let shared = Some(PathBuf::from(folder));
    Arc::new(Simulator::new(SimOptions { topology, shared, ..SimOptions::default() }).unwrap())
}

fn pool(driver: &Arc<dyn Driver>) -> Arc<GpuPool> {
    let (extent, limit) = (Bytes::mib(4), Bytes::mib(32));
    let settings = Settings { extent, limit, ..Settings::for_memory(Bytes::mib(64)) };
    let options = PoolOptions { settings: Some(settings), exportable: true, ..PoolOptions::default() };
    Arc::new(GpuPool::new(driver.clone(), GPU, options).unwrap())
}

fn share(exporter: &Exporter, pool: &Arc<GpuPool>, block: &Block) -> Shared {
    let (pool, address) = (pool.clone(), block.address);
    exporter.share(address, move || pool.export(address)).unwrap()
}

/// What each side writes all over the block of a number.
fn pattern(side: u64, block: usize, size: Bytes) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(size.get()).unwrap()];
    glake_sim::pattern::fill(&mut bytes, 0, (block as u64) << 32 ^ side);
    bytes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

fn other(test: &str, folder: &str, blocks: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", test]).env(FOLDER, folder).env(BLOCKS, blocks);
    command
}

fn assert_ran(child: &Output) {
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{child:?}");
}

#[test]
fn two_processes_see_the_same_bytes() {
    let made = tempfile::tempdir().unwrap();
    let folder = made.path().to_str().unwrap();
    let driver = driver(folder);
    let pool = pool(&driver);
    let stream = PoolStream::of(&*driver, GPU, Stream::LEGACY).unwrap();
    let malloc = |size| pool.malloc(size, stream).unwrap();
    let fragments: Vec<Block> = (0..7).map(|_| malloc(Bytes::mib(4))).collect();
    for block in fragments.iter().step_by(2) {
        pool.free(block.address).unwrap();
    }
    let blocks = [malloc(Bytes::mib(14)), fragments[1], malloc(Bytes::kib(5)), malloc(Bytes::new(100))];
    assert_eq!(pool.counters().stitches, 1);

    let exporter = Exporter::new();
    let mut told = String::new();
    for (number, block) in blocks.iter().enumerate() {
        pool.write(block.address, &pattern(1, number, block.size)).unwrap();
        let shared = share(&exporter, &pool, block);
        told += &format!("{} {} {} ", hex(&shared.handle), shared.offset.get(), block.size.get());
    }
    assert_ran(&other("the_importer", folder, &told).output().unwrap());
    for (number, block) in blocks.iter().enumerate() {
        let mut bytes = vec![0; usize::try_from(block.size.get()).unwrap()];
        pool.read(block.address, &mut bytes).unwrap();
        assert!(bytes == pattern(2, number, block.size), "block {number} as the importer wrote it");
    }
}

/// The other side of the test above.
#[test]
#[ignore = "run by another test"]
fn the_importer() {
    let (Ok(folder), Ok(told)) = (std::env::var(FOLDER), std::env::var(BLOCKS)) else { return };
    let completion_events = CompletionEvents::new(driver(&folder));
    let told: Vec<&str> = told.split_whitespace().collect();
    for (number, block) in told.chunks(3).enumerate() {
        let (handle, offset, size) = (unhex(block[0]), block[1].parse(), block[2].parse().map(Bytes::new));
        let (offset, size) = (Bytes::new(offset.unwrap()), size.unwrap());
        let import = Import::open(&completion_events, GPU, DeviceSet::EMPTY, open(&handle).unwrap()).unwrap();
        let mut bytes = vec![0; usize::try_from(size.get()).unwrap()];
        import.read(offset, &mut bytes).unwrap();
        assert!(bytes == pattern(1, number, size), "block {number} as the exporter wrote it");
        import.write(offset, &pattern(2, number, size)).unwrap();
        import.close().unwrap();
    }
}

#[test]
fn an_exporter_that_ended_is_gone() {
    let made = tempfile::tempdir().unwrap();
    let folder = made.path().to_str().unwrap();
    let mut child =
        other("the_exporter", folder, "").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = Vec::new();
    let mut output = child.stdout.take().unwrap();
    while !said.ends_with(b".") {
        let mut byte = [0];
        output.read_exact(&mut byte).unwrap();
        said.extend(byte);
    }
    let said = String::from_utf8(said).unwrap();
    let handle = unhex(said.rsplit(' ').next().unwrap().trim_end_matches('.'));
    assert_eq!(open(&handle).unwrap().len(), 1, "while it lives");
    drop(child.stdin.take());
    output.read_to_end(&mut Vec::new()).unwrap();
    assert!(child.wait().unwrap().success(), "the thread does not keep the process");
    assert!(matches!(open(&handle), Err(ShareError::Gone { pid }) if pid == child.id()));
}

/// The other side of the test above: shares a block until its input ends, and ends without a word.
#[test]
#[ignore = "run by another test"]
fn the_exporter() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let driver = driver(&folder);
    let pool = pool(&driver);
    let block = pool.malloc(Bytes::mib(3), PoolStream::of(&*driver, GPU, Stream::LEGACY).unwrap()).unwrap();
    let exporter = Exporter::new();
    let shared = share(&exporter, &pool, &block);
    println!(" {}.", hex(&shared.handle));
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    std::process::exit(0);
}
