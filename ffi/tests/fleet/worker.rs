//! A worker's process: the library through its C interface, controlled line by line.
//!
//! ```text
//! script ── load 8 │ use 50 3 │ spin Steps │ grow 2 │ … ──► commands (this thread) ──► glake_*
//!        ◄─ ok … │ failed …        served ◄── each use of a spin that waited
//! ```
//!
//! Invariant: no memory of a live block is unmapped while the worker loads, or while a use runs that is not at a safe point. Violations are
//! reported in the next answer.

use std::ffi::{CString, c_void};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gmlake::*;

use crate::program::Spin;

const MIB: usize = 1 << 20;
/// Bytes written and compared at a time.
const PAGE: usize = 256 << 10;
/// Duration of a use of a spin.
const SHORT: Duration = Duration::from_millis(3);
/// Minimum wait of a use that counts as a wait for memory.
const WAITED: Duration = Duration::from_millis(2);
/// Time until a refused allocation is tried again, in programs that retry.
const AGAIN: Duration = Duration::from_millis(50);

type Outcome<T> = Result<T, String>;

/// Live block of memory.
#[derive(Clone, Copy, Debug)]
struct Block {
    address: usize,
    size: usize,
    /// Number from which its bytes are computed.
    seed: u64,
    /// Whether it was allocated after the load.
    is_grown: bool,
}

/// Memory that its owner relies on; checked when memory is unmapped.
#[derive(Debug, Default)]
struct Guarded {
    blocks: Mutex<Vec<Block>>,
    is_loading: AtomicBool,
    /// Number of running uses that are at no safe point.
    running: AtomicI64,
    /// Violations: memory that was unmapped nevertheless.
    taken: Mutex<Option<String>>,
}

static GUARDED: Guarded = Guarded {
    blocks: Mutex::new(Vec::new()),
    is_loading: AtomicBool::new(false),
    running: AtomicI64::new(0),
    taken: Mutex::new(None),
};

/// Writing end of a connection to the script.
#[derive(Debug)]
struct Script(Mutex<UnixStream>);

/// Serves a script until it says `exit`.
pub(crate) fn run(folder: &Path, name: &str) -> ! {
    let stream = UnixStream::connect(folder.join("control")).unwrap();
    let mut read = BufReader::new(stream.try_clone().unwrap()).lines();
    let (said, lines) = std::sync::mpsc::channel();
    // Whatever it waits for, it ends with the test.
    std::thread::spawn(move || {
        let _ = read.by_ref().map_while(Result::ok).try_for_each(|line| said.send(line));
        std::process::exit(0)
    });
    let script: &'static Script = Box::leak(Box::new(Script(Mutex::new(stream))));
    script.say(&format!("{name} {}", std::process::id()));
    let mut worker = Worker { script, next_seed: u64::from(std::process::id()) << 20, spinning: Vec::new() };
    for line in lines {
        let outcome =
            worker.obey(&line, name).and_then(|answer| match GUARDED.taken.lock().unwrap().take() {
                Some(taken) => Err(taken),
                None => Ok(answer),
            });
        match outcome {
            Ok(answer) => script.say(&format!("ok {answer}")),
            Err(why) => script.say(&format!("failed {}", why.replace('\n', " "))),
        }
        if line == "exit" {
            break;
        }
    }
    std::process::exit(0)
}

impl Script {
    fn say(&self, line: &str) {
        let _ = writeln!(self.0.lock().unwrap(), "{line}");
    }
}

struct Worker {
    script: &'static Script,
    next_seed: u64,
    spinning: Vec<Spinning>,
}

/// A thread of uses, which returns the longest wait of a use.
struct Spinning {
    thread: JoinHandle<Outcome<Duration>>,
}

/// Whether spins should end.
static IS_OVER: AtomicBool = AtomicBool::new(false);

impl Worker {
    fn obey(&mut self, line: &str, name: &str) -> Outcome<String> {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "load" => self.load(number(1)).map(|()| String::new()),
            "join" => {
                GUARDED.is_loading.store(false, Ordering::SeqCst);
                // SAFETY: null for both is allowed.
                done(unsafe { glake_join(null(), null()) }).map(|()| String::new())
            }
            "join_first" => join(name, words[1]).map(|()| String::new()),
            "load_in_use" => self.load_in_use(number(1), Duration::from_millis(number(2))),
            "context" => {
                let mut stream = null_mut();
                // SAFETY: the stream's place may be written.
                done(unsafe { glake_stream_create(0, &raw mut stream) }).map(|()| String::new())
            }
            "use" => {
                let (lasts, steps) = (Duration::from_millis(number(1)), u32::try_from(number(2)).unwrap());
                let waited = use_once(lasts, steps)?;
                Ok(waited.as_millis().to_string())
            }
            "spin" => {
                let kind = [Spin::Steps, Spin::Brief, Spin::Overlapping]
                    .into_iter()
                    .find(|kind| format!("{kind:?}") == words[1])
                    .unwrap();
                self.spin(kind);
                Ok(String::new())
            }
            "stop" => self.stop().map(|waited| waited.as_millis().to_string()),
            "grow" => self.grow(number(1)),
            "shed" => shed().map(|()| String::new()),
            "leave" => done(glake_leave()).map(|()| String::new()),
            "exit" => Ok(String::new()),
            other => Err(format!("{other} is no command")),
        }
    }

    /// Allocates a part of the worker's memory, and writes it, without a running use.
    fn load(&mut self, mib: u64) -> Outcome<()> {
        if !GUARDED.is_loading.swap(true, Ordering::SeqCst) {
            watch_mappings()?;
        }
        let block = self.allocate("weights", mib, false)?;
        fill(block)
    }

    /// Loads as a program that has joined before: within a use, retried if it is refused.
    fn load_in_use(&mut self, mib: u64, within: Duration) -> Outcome<String> {
        watch_mappings()?;
        let begin = Instant::now();
        loop {
            let used = begin_use()?;
            let outcome = self.allocate("weights", mib, false);
            let filled = outcome.and_then(fill);
            end_use(used)?;
            match filled {
                Ok(()) => return Ok(String::new()),
                Err(why) if begin.elapsed() > within => return Err(why),
                Err(_) => std::thread::sleep(AGAIN),
            }
        }
    }

    fn grow(&mut self, mib: u64) -> Outcome<String> {
        let used = begin_use()?;
        let outcome = self.allocate("cache", mib, true).and_then(fill);
        end_use(used)?;
        match outcome {
            Err(why) if why.contains("out of memory") => Ok(format!("refused: {why}")),
            outcome => outcome.map(|()| "grown".to_owned()),
        }
    }

    fn allocate(&mut self, tag: &str, mib: u64, is_grown: bool) -> Outcome<Block> {
        let (tag, size) = (CString::new(tag).unwrap(), usize::try_from(mib).unwrap() * MIB);
        let mut address: *mut c_void = null_mut();
        // SAFETY: the tag is a text, the address's place may be written, and null is a stream.
        unsafe {
            done(glake_region_define(tag.as_ptr(), GLAKE_POLICY_KEEP, GLAKE_HOST_COPY_DROP))?;
            done(glake_region_push(tag.as_ptr()))?;
            let allocated = done(glake_alloc(0, size, null_mut(), &raw mut address));
            glake_region_pop();
            allocated?;
        }
        self.next_seed += 1;
        let block = Block { address: address as usize, size, seed: self.next_seed, is_grown };
        GUARDED.blocks.lock().unwrap().push(block);
        Ok(block)
    }

    fn spin(&mut self, kind: Spin) {
        IS_OVER.store(false, Ordering::SeqCst);
        let threads = if kind == Spin::Overlapping { 2 } else { 1 };
        for number in 0..threads {
            let script = self.script;
            let body = move || match kind {
                Spin::Steps => spin_in_steps(script),
                Spin::Brief | Spin::Overlapping => {
                    // Half a use later.
                    std::thread::sleep(SHORT / 2 * number);
                    spin_in_uses(script)
                }
            };
            // What fails is said at once: the script may wait for something else.
            let thread =
                std::thread::spawn(move || body().inspect_err(|why| script.say(&format!("failed {why}"))));
            self.spinning.push(Spinning { thread });
        }
    }

    fn stop(&mut self) -> Outcome<Duration> {
        IS_OVER.store(true, Ordering::SeqCst);
        let mut longest = Duration::ZERO;
        for Spinning { thread } in self.spinning.drain(..) {
            longest = longest.max(thread.join().unwrap()?);
        }
        Ok(longest)
    }
}

/// Runs one use after the other.
fn spin_in_uses(script: &Script) -> Outcome<Duration> {
    let (mut longest, mut is_first) = (Duration::ZERO, true);
    while !IS_OVER.load(Ordering::SeqCst) {
        let begin = Instant::now();
        let used = begin_use()?;
        let waited = begin.elapsed();
        longest = longest.max(waited);
        let is_right = if waited > WAITED || is_first { compare() } else { Ok(()) };
        std::thread::sleep(SHORT);
        end_use(used)?;
        is_right?;
        if waited > WAITED || std::mem::take(&mut is_first) {
            script.say("served");
        }
    }
    Ok(longest)
}

/// Runs one use with many safe points.
fn spin_in_steps(script: &Script) -> Outcome<Duration> {
    let begin = Instant::now();
    let used = begin_use()?;
    let mut longest = begin.elapsed();
    script.say("served");
    let mut is_right = compare();
    while !IS_OVER.load(Ordering::SeqCst) && is_right.is_ok() {
        std::thread::sleep(SHORT);
        if let Some(waited) = safe_point(used) {
            longest = longest.max(waited);
            script.say("served");
            is_right = compare();
        }
    }
    end_use(used)?;
    is_right.map(|()| longest)
}

/// Runs a use of the given duration, and checks its bytes at its begin, after each safe point, and at its end. Returns the time that it
/// waited.
fn use_once(lasts: Duration, steps: u32) -> Outcome<Duration> {
    let begin = Instant::now();
    let used = begin_use()?;
    let mut waited = begin.elapsed();
    let mut is_right = compare();
    for step in 0..steps {
        std::thread::sleep(lasts / steps);
        if step + 1 < steps
            && is_right.is_ok()
            && let Some(parked) = safe_point(used)
        {
            waited = waited.max(parked);
            is_right = compare();
        }
    }
    let is_right = is_right.and_then(|()| compare());
    end_use(used)?;
    is_right.map(|()| waited)
}

fn begin_use() -> Outcome<u64> {
    GUARDED.is_loading.store(false, Ordering::SeqCst);
    let mut used = 0;
    // SAFETY: no tags are read, and the number's place may be written.
    done(unsafe { glake_use_begin(null(), 0, GLAKE_WHEN_CLOSED_REFILL, -1, &raw mut used) })?;
    GUARDED.running.fetch_add(1, Ordering::SeqCst);
    Ok(used)
}

fn end_use(used: u64) -> Outcome<()> {
    GUARDED.running.fetch_sub(1, Ordering::SeqCst);
    done(glake_use_end(used))
}

/// Returns the time that the use was parked there; `None` if it was not.
fn safe_point(used: u64) -> Option<Duration> {
    let begin = Instant::now();
    GUARDED.running.fetch_sub(1, Ordering::SeqCst);
    let was_parked = glake_safepoint(used) != 0;
    GUARDED.running.fetch_add(1, Ordering::SeqCst);
    was_parked.then(|| begin.elapsed())
}

fn join(name: &str, socket: &str) -> Outcome<()> {
    let (name, socket) = (CString::new(name).unwrap(), CString::new(socket).unwrap());
    // SAFETY: both are texts.
    done(unsafe { glake_join(name.as_ptr(), socket.as_ptr()) })
}

fn shed() -> Outcome<()> {
    let grown: Vec<Block> = GUARDED.blocks.lock().unwrap().extract_if(.., |block| block.is_grown).collect();
    grown.into_iter().try_for_each(|block| done(glake_free(block.address as *mut c_void)))
}

/// Converts a status to a result, with the library's text.
fn done(status: i32) -> Outcome<()> {
    match status {
        GLAKE_OK => Ok(()),
        // SAFETY: the text is the library's until the next call of this thread.
        _ => Err(unsafe { std::ffi::CStr::from_ptr(glake_last_error()) }.to_string_lossy().into_owned()),
    }
}

fn watch_mappings() -> Outcome<()> {
    // SAFETY: the observer lives as long as the process, and calls nothing of the library.
    done(unsafe { glake_on_mapping(Some(on_mapping), null_mut()) })
}

/// Records a violation if memory about to be unmapped is relied on.
unsafe extern "C" fn on_mapping(_: *mut c_void, _: i32, mapped: bool, address: u64, size: u64) {
    let is_loading = GUARDED.is_loading.load(Ordering::SeqCst);
    let running = GUARDED.running.load(Ordering::SeqCst);
    if mapped || !(is_loading || running > 0) {
        return;
    }
    let start = usize::try_from(address).unwrap_or_default();
    let end = start + usize::try_from(size).unwrap_or_default();
    let blocks = GUARDED.blocks.lock().unwrap();
    if let Some(block) = blocks.iter().find(|block| block.address < end && start < block.address + block.size)
    {
        let why = if is_loading { "while it loads".to_owned() } else { format!("while {running} uses run") };
        let text = format!("memory of a block of {} MiB is taken {why}", block.size / MIB);
        GUARDED.taken.lock().unwrap().get_or_insert(text);
    }
}

/// Returns the bytes of a page of a block.
fn page(block: Block, number: usize, into: &mut Vec<u8>) {
    into.clear();
    into.resize(PAGE, (block.seed % 251) as u8);
    into[..8].copy_from_slice(&block.seed.to_le_bytes());
    into[8..16].copy_from_slice(&(number as u64).to_le_bytes());
}

fn fill(block: Block) -> Outcome<()> {
    let mut bytes = Vec::new();
    for number in 0..block.size / PAGE {
        page(block, number, &mut bytes);
        let to = (block.address + number * PAGE) as *mut c_void;
        // SAFETY: the page is the block's, which nobody else uses, and the copy is over when the call returns.
        done(unsafe {
            glake_copy_async(to, bytes.as_ptr().cast(), PAGE, null_mut(), GLAKE_COPY_BLOCKING, null_mut())
        })?;
    }
    Ok(())
}

/// Compares all bytes with the written ones.
fn compare() -> Outcome<()> {
    let blocks = GUARDED.blocks.lock().unwrap().clone();
    let (mut expected, mut found) = (Vec::new(), vec![0_u8; PAGE]);
    for block in blocks {
        for number in 0..block.size / PAGE {
            page(block, number, &mut expected);
            let from = (block.address + number * PAGE) as *const c_void;
            let into = found.as_mut_ptr().cast();
            // SAFETY: the page is the block's, the bytes are this thread's, and the copy is over when the call returns.
            done(unsafe { glake_copy_async(into, from, PAGE, null_mut(), GLAKE_COPY_BLOCKING, null_mut()) })?;
            if expected != found {
                return Err(format!("page {number} of a block of {} MiB has wrong bytes", block.size / MIB));
            }
        }
    }
    Ok(())
}
