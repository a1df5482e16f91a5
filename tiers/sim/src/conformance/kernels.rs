//! Checks of modules and kernels: the same module as PTX and as host code.

use glake_units::Bytes;

use super::harness::{Harness, touch};
use super::outcome::{Outcome, Verdict, refused, same};
use super::{Check, GPU};
use glake_device::owned::digest;
use glake_device::{Address, HostKernel, KernelMemory, LaunchRequest, ModuleSource, Stream, Touched};

pub(super) const CHECKS: &[Check] = &[
    Check { name: "kernels compute on mapped memory", run: compute },
    Check { name: "a kernel that is not there is not found", run: not_found },
    Check { name: "a GPU's digest is the host's, whatever the launch is like", run: digest },
];

const SOURCE: ModuleSource = ModuleSource {
    ptx: include_str!("kernels.ptx"),
    host: &[
        HostKernel { name: "glake_fill", body: host_fill },
        HostKernel { name: "glake_add", body: host_add },
    ],
};

fn host_fill(memory: &mut dyn KernelMemory, arguments: &[u64]) {
    let [to, words, value] = *arguments else { return };
    let bytes = (value as u32).to_le_bytes().repeat(words as usize);
    // A stray write is told to whoever waits for the device.
    let _ = memory.write(Address(to), &bytes);
}

fn host_add(memory: &mut dyn KernelMemory, arguments: &[u64]) {
    let [to, a, b, words] = *arguments else { return };
    let mut left = vec![0; words as usize * 4];
    let mut right = left.clone();
    if memory.read(Address(a), &mut left).and(memory.read(Address(b), &mut right)).is_err() {
        return;
    }
    let (lefts, rights) = (left.as_chunks::<4>().0, right.as_chunks::<4>().0);
    let sum = |(a, b): (&[u8; 4], &[u8; 4])| u32::from_le_bytes(*a).wrapping_add(u32::from_le_bytes(*b));
    let sums: Vec<u8> = lefts.iter().zip(rights).flat_map(|pair| sum(pair).to_le_bytes()).collect();
    let _ = memory.write(Address(to), &sums);
}

const WORDS: u64 = 100_000;
const BYTES: Bytes = Bytes::new(WORDS * 4);

fn compute(harness: &Harness) -> Outcome {
    let unit = harness.unit()?;
    let stream = harness.stream(GPU)?;
    let module = harness.module(GPU, &SOURCE)?;
    let fill = harness.driver().kernel_find(GPU, module, "glake_fill")?;
    let add = harness.driver().kernel_find(GPU, module, "glake_add")?;
    let (a, b, sum) = (harness.memory(unit)?, harness.memory(unit)?, harness.memory(unit)?);
    let block = 256;
    let grid = u32::try_from(WORDS.div_ceil(block)).unwrap_or(u32::MAX);
    let launch = |kernel, arguments: &[u64], reads: &[_], writes: &[_], stream: Stream| {
        let (grid, block) = ([grid, 1, 1], [block as u32, 1, 1]);
        harness.launch(
            stream,
            &LaunchRequest { kernel, grid, block, arguments, touches: &Touched { reads, writes } },
        )
    };
    launch(fill, &[a.0, WORDS, 30], &[], &[touch(a, BYTES)], stream)?;
    launch(fill, &[b.0, WORDS, 12], &[], &[touch(b, BYTES)], stream)?;
    let reads = [touch(a, BYTES), touch(b, BYTES)];
    launch(add, &[sum.0, a.0, b.0, WORDS], &reads, &[touch(sum, BYTES)], stream)?;
    harness.driver().stream_synchronize(GPU, stream)?;
    let found = harness.read(sum, Bytes::new(BYTES.get() + 4))?;
    let (words, _) = found.as_chunks::<4>();
    let right = words.iter().take_while(|word| u32::from_le_bytes(**word) == 42).count();
    same("words that hold the sum", right as u64, WORDS)?;
    Ok(Verdict::Passed)
}

fn not_found(harness: &Harness) -> Outcome {
    let module = harness.module(GPU, &SOURCE)?;
    refused("found", harness.driver().kernel_find(GPU, module, "glake_nothing"))?;
    Ok(Verdict::Passed)
}

/// Size of the digested range: odd at its end, and more than one piece per warp in the smallest launch.
const DIGESTED: Bytes = Bytes::new((1 << 20) + 77);

fn digest(harness: &Harness) -> Outcome {
    let stream = harness.stream(GPU)?;
    let module = harness.module(GPU, &digest::SOURCE)?;
    let kernel = harness.driver().kernel_find(GPU, module, digest::KERNEL)?;
    let (memory, work) = (harness.memory(Bytes::mib(2))?, harness.memory(Bytes::mib(2))?);
    let words = (0..Bytes::mib(2).get() / 8).map(|at| at.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    harness.write(memory, &bytes)?;
    let digested = &bytes[..DIGESTED.get() as usize];
    let expected = digest::sum(digested, 0);
    for (piece, grid, block) in [(32 << 10, 512, 512), (4096, 3, 64), (1 << 20, 1, 32), (48, 132, 1024)] {
        let starts = (0..DIGESTED.get()).step_by(piece);
        let entry = |at: u64| [memory.0 + at, (piece as u64).min(DIGESTED.get() - at), at / 8];
        let list: Vec<u8> = starts.flat_map(entry).flat_map(u64::to_le_bytes).collect();
        let (count, sums) = (list.len() as u64 / 24, Address(work.0 + (1 << 20)));
        harness.write(work, &list)?;
        let request = LaunchRequest {
            kernel,
            grid: [grid, 1, 1],
            block: [block, 1, 1],
            arguments: &[work.0, count, sums.0, u64::from(grid)],
            touches: &Touched {
                reads: &[touch(memory, DIGESTED), touch(work, Bytes::new(list.len() as u64))],
                writes: &[touch(sums, Bytes::new(u64::from(grid) * 8))],
            },
        };
        harness.launch(stream, &request)?;
        harness.driver().stream_synchronize(GPU, stream)?;
        let found = harness.read(sums, Bytes::new(u64::from(grid) * 8))?;
        let sums = found.as_chunks::<8>().0.iter().map(|sum| u64::from_le_bytes(*sum));
        same("the sum of a digest", sums.fold(0, u64::wrapping_add), expected)?;
    }
    Ok(Verdict::Passed)
}
