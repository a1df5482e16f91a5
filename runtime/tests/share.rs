//! A block goes from one process to another: the same bytes on both sides, on a simulated GPU that both have.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::error::Error;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet, OwnedStream};
use glake_device::{Address, DeviceId, Driver, Stream};
use glake_runtime::share::{Exporter, Opened, ShareError, Shared, open};
use glake_sim::{SimOptions, SimTopology, Simulator};
use glake_stitch::Settings;
use glake_tiers::{Block, GpuPool, Import, PoolOptions, PoolStream};
use glake_units::Bytes;
use rustix::process::{Resource, Rlimit, setrlimit};

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
    exporter.share(address, move |part| pool.export(address, part)).unwrap()
}

/// Maps all of a block that another process shared.
fn import(completion_events: &Arc<CompletionEvents>, handle: &[u8]) -> Result<Import, Box<dyn Error>> {
    let Opened { sizes, mut descriptors } = open(handle)?;
    Import::open(completion_events, GPU, DeviceSet::EMPTY, &sizes, |from| Ok(descriptors.receive(from)?))
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
        let import = import(&completion_events, &handle).unwrap();
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
    let mut child = start("the_exporter", folder, "");
    let handle = unhex(&said(&mut child));
    assert_eq!(open(&handle).unwrap().sizes.len(), 1, "while it lives");
    drop(child.stdin.take());
    child.stdout.take().unwrap().read_to_end(&mut Vec::new()).unwrap();
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

/// Extents of the blocks below, of the smallest size.
const MANY: u64 = 300;
const EXTENT: Bytes = Bytes::mib(2);

fn large(folder: &str) -> Arc<Simulator> {
    let mut topology = SimTopology::uniform(1, Bytes::gib(2));
    topology.gpus[0].context = Bytes::mib(2);
    let shared = Some(PathBuf::from(folder));
    Arc::new(Simulator::new(SimOptions { topology, shared, ..SimOptions::default() }).unwrap())
}

/// Leaves this process `free` file descriptors; the limit of open files.
fn may_open(free: usize) -> u64 {
    let open = |number: &u64| std::fs::read_link(format!("/proc/self/fd/{number}")).is_ok();
    let last = (0..).filter(|number| !open(number)).nth(free - 1).unwrap();
    setrlimit(Resource::Nofile, Rlimit { current: Some(last + 1), maximum: Some(last + 1) }).unwrap();
    last + 1
}

/// The bytes that one side writes to an extent of a large block.
fn mark(side: u64, extent: u64) -> [u8; 16] {
    let (side, extent) = (side.to_le_bytes(), extent.to_le_bytes());
    std::array::from_fn(|at| if at < 8 { side[at] } else { extent[at - 8] })
}

fn start(test: &str, folder: &str, blocks: &str) -> Child {
    other(test, folder, blocks).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

/// What a child says up to a full stop, behind the last space.
fn said(child: &mut Child) -> String {
    let (output, mut said) = (child.stdout.as_mut().unwrap(), Vec::new());
    while !said.ends_with(b".") {
        let mut byte = [0];
        output.read_exact(&mut byte).unwrap();
        said.extend(byte);
    }
    let said = String::from_utf8(said).unwrap();
    said.rsplit(' ').next().unwrap().trim_end_matches('.').to_owned()
}

/// A child's input ends; it is to succeed.
fn finish(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn blocks_of_many_extents_take_few_descriptors() {
    let made = tempfile::tempdir().unwrap();
    let folder = made.path().to_str().unwrap();
    let mut exporter = start("the_exporter_of_many", folder, "24");
    let handle = said(&mut exporter);
    // Some have as many descriptors left as a batch has, others fewer, and one of them several threads.
    let importers = ["1 30 1", "2 6 1", "3 4 1", "4 12 4"]
        .map(|of| start("the_importer_of_many", folder, &format!("{of} {handle}")));
    importers.into_iter().for_each(finish);
    finish(exporter);
}

#[test]
fn a_process_without_descriptors_says_so_and_its_limit() {
    let made = tempfile::tempdir().unwrap();
    let folder = made.path().to_str().unwrap();
    let mut exporters = ["24", "1"].map(|more| start("the_exporter_of_many", folder, more));
    let [able, unable] = [0, 1].map(|of| said(&mut exporters[of]));
    let importer = start("the_importer_without_descriptors", folder, &format!("{able} {unable}"));
    finish(importer);
    exporters.into_iter().for_each(|mut exporter| {
        exporter.kill().unwrap();
        exporter.wait().unwrap();
    });
}

/// A half import is not left: neither where a capture is open, nor where none is.
#[test]
fn nothing_stays_mapped_of_an_exporter_that_dies_between_batches() {
    for captures in [false, true] {
        let made = tempfile::tempdir().unwrap();
        let folder = made.path().to_str().unwrap();
        let mut exporter = start("the_exporter_of_many", folder, "24");
        let handle = unhex(&said(&mut exporter));
        let sim = large(folder);
        let driver: Arc<dyn Driver> = sim.clone();
        let stream = OwnedStream::new(&driver, GPU).unwrap();
        if captures {
            sim.begin_capture(GPU, stream.id()).unwrap();
        }
        let Opened { sizes, mut descriptors } = open(&handle).unwrap();
        let events = CompletionEvents::new(driver);
        let mut mapped = 0;
        let opened = Import::open(&events, GPU, DeviceSet::EMPTY, &sizes, |from| {
            if from > 0 && exporter.try_wait().unwrap().is_none() {
                mapped = sim.census().mappings;
                exporter.kill().unwrap();
                exporter.wait().unwrap();
            }
            Ok::<_, Box<dyn Error>>(descriptors.receive(from)?)
        });
        let error = opened.map(drop).unwrap_err();
        assert!(
            matches!(error.downcast_ref(), Some(ShareError::Gone { pid }) if *pid == exporter.id()),
            "{error}"
        );
        let census = sim.census();
        assert!(
            mapped > 0 && (census.mappings, census.extents, census.reservations) == (0, 0, 0),
            "{mapped} {census:?}"
        );
        if captures {
            sim.end_capture(GPU, stream.id()).unwrap();
        }
    }
}

/// The other side of the tests above: shares a block of many extents, with few descriptors left, until its input ends; then it has what the
/// importers wrote.
#[test]
#[ignore = "run by another test"]
fn the_exporter_of_many() {
    let (Ok(folder), Ok(free)) = (std::env::var(FOLDER), std::env::var(BLOCKS)) else { return };
    let driver: Arc<dyn Driver> = large(&folder);
    let settings = Settings { extent: EXTENT, limit: Bytes::gib(1), ..Settings::for_memory(Bytes::gib(2)) };
    let options = PoolOptions { settings: Some(settings), exportable: true, ..PoolOptions::default() };
    let pool = Arc::new(GpuPool::new(driver.clone(), GPU, options).unwrap());
    let stream = PoolStream::of(&*driver, GPU, Stream::LEGACY).unwrap();
    let block = pool.malloc(Bytes::new(MANY * EXTENT.get()), stream).unwrap();
    let at = |extent: u64, side: u64| Address(block.address.0 + extent * EXTENT.get() + 16 * side);
    for extent in 0..MANY {
        pool.write(at(extent, 0), &mark(0, extent)).unwrap();
    }
    let exporter = Exporter::new();
    let shared = share(&exporter, &pool, &block);
    assert_eq!(open(&shared.handle).unwrap().sizes.len() as u64, MANY);
    // The thread has met its first client: what it needs besides is open.
    may_open(free.parse().unwrap());
    println!(" {}.", hex(&shared.handle));
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    for (extent, side) in (0..MANY).flat_map(|extent| (1..=4).map(move |side| (extent, side))) {
        let mut bytes = [0; 16];
        pool.read(at(extent, side), &mut bytes).unwrap();
        assert_eq!(bytes, mark(side, extent), "extent {extent} as importer {side} wrote it");
    }
    std::process::exit(0);
}

/// The other side of the test above: opens the block in some threads, with few descriptors left.
#[test]
#[ignore = "run by another test"]
fn the_importer_of_many() {
    let (Ok(folder), Ok(told)) = (std::env::var(FOLDER), std::env::var(BLOCKS)) else { return };
    let told: Vec<&str> = told.split(' ').collect();
    let [side, free, threads] = [0, 1, 2].map(|of| told[of].parse::<u64>().unwrap());
    let handle = unhex(told[3]);
    let events = CompletionEvents::new(large(&folder));
    // What the first call of the driver opens is open.
    assert_eq!(events.driver().devices().unwrap().len(), 1);
    may_open(usize::try_from(free).unwrap());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let import = import(&events, &handle).unwrap();
                for extent in 0..MANY {
                    let (at, mut bytes) = (Bytes::new(extent * EXTENT.get()), [0; 16]);
                    import.read(at, &mut bytes).unwrap();
                    assert_eq!(bytes, mark(0, extent), "extent {extent} as the exporter wrote it");
                    import.write(at.saturating_add(Bytes::new(16 * side)), &mark(side, extent)).unwrap();
                }
                import.close().unwrap();
            });
        }
    });
}

/// The other side of the test above: opens the block of an exporter that has descriptors when it has none itself, and that of one without.
#[test]
#[ignore = "run by another test"]
fn the_importer_without_descriptors() {
    let (Ok(folder), Ok(told)) = (std::env::var(FOLDER), std::env::var(BLOCKS)) else { return };
    let (able, unable) = told.split_once(' ').unwrap();
    let events = CompletionEvents::new(large(&folder));
    let error = import(&events, &unhex(unable)).map(drop).unwrap_err().to_string();
    assert!(
        error.contains("has no file descriptor left to send it by") && error.contains("ulimit -n"),
        "{error}"
    );
    for free in [2, 1] {
        let limit = may_open(free);
        let error = import(&events, &unhex(able)).map(drop).unwrap_err().to_string();
        let named =
            [" no file descriptor left".to_owned(), format!(" {limit} files"), "(ulimit -n)".to_owned()];
        assert!(named.iter().all(|part| error.contains(part)), "with {free}: {error}");
    }
}
