//! Graphs over several streams and devices.

use super::*;

/// Two GPUs, each with a stream and memory that both may touch; events of both.
struct Pair {
    sim: Simulator,
    streams: [Stream; 2],
    memory: [Address; 2],
    fork: Event,
    join: Event,
}

fn pair() -> Pair {
    let sim = server(2);
    let gpus = [GPU, PEER];
    let streams = gpus.map(|gpu| sim.stream_create(gpu, Priority::Normal).unwrap());
    let memory = gpus.map(|gpu| mapped_at(&sim, Place::Gpu(gpu), 2, &gpus));
    let fork = sim.event_create(GPU, EventKind::Plain).unwrap();
    let join = sim.event_create(PEER, EventKind::Plain).unwrap();
    Pair { sim, streams, memory, fork, join }
}

impl Pair {
    /// A kernel of 100 us that adds one to the first byte of a memory.
    fn adds(&self, gpu: DeviceId, at: Address) {
        let stream = self.streams[gpu.0 as usize];
        let body = move |memory: &mut dyn KernelMemory| {
            let mut byte = [0];
            memory.read(at, &mut byte).unwrap();
            memory.write(at, &[byte[0] + 1]).unwrap();
        };
        self.sim.enqueue_kernel(gpu, stream, &touch(at, 1), &touch(at, 1), US(100), body).unwrap();
    }

    fn forks(&self) {
        self.sim.event_record(GPU, self.fork, self.streams[0]).unwrap();
        self.sim.stream_wait_event(PEER, self.streams[1], self.fork).unwrap();
    }

    fn joins(&self) {
        self.sim.event_record(PEER, self.join, self.streams[1]).unwrap();
        self.sim.stream_wait_event(GPU, self.streams[0], self.join).unwrap();
    }

    fn begins(&self) {
        self.sim.begin_capture(GPU, self.streams[0]).unwrap();
    }

    fn ends(&self) -> Result<Graph> {
        self.sim.end_capture(GPU, self.streams[0])
    }
}

#[test]
fn operations_run_on_their_devices_side_by_side() {
    let pair = pair();
    pair.begins();
    pair.adds(GPU, pair.memory[0]);
    pair.forks();
    pair.adds(GPU, pair.memory[0]);
    pair.adds(PEER, pair.memory[1]);
    pair.joins();
    pair.adds(GPU, pair.memory[1]);
    let graph = pair.ends().unwrap();
    assert_eq!(graph.operations(), 4);
    for stream in pair.streams.iter().zip([GPU, PEER]) {
        assert_eq!(pair.sim.capture_state(stream.1, *stream.0).unwrap(), CaptureState::None);
    }
    let start = pair.sim.now();
    for round in 1..=2 {
        pair.adds(GPU, pair.memory[1]);
        pair.sim.launch_graph(&graph, GPU, pair.streams[0]).unwrap();
        pair.adds(GPU, pair.memory[0]);
        pair.sim.stream_synchronize(GPU, pair.streams[0]).unwrap();
        let took = pair.sim.now() - start;
        assert!(took >= US(500 * round) && took < US(505 * round), "two of six are side by side: {took:?}");
        let bytes = pair.memory.map(|at| first(&pair.sim, at));
        assert_eq!(bytes.map(u64::from), [3 * round, 3 * round]);
    }
}

#[test]
fn a_graph_without_an_order_of_its_own_is_refused_when_it_is_launched() {
    let pair = pair();
    pair.begins();
    pair.forks();
    pair.adds(GPU, pair.memory[0]);
    pair.adds(PEER, pair.memory[0]);
    pair.joins();
    let graph = pair.ends().unwrap();
    assert_eq!(rule(pair.sim.launch_graph(&graph, GPU, pair.streams[0])), Refusal::Unordered);
}

#[test]
fn work_that_is_not_joined_breaks_the_capture() {
    let pair = pair();
    pair.begins();
    pair.forks();
    pair.adds(PEER, pair.memory[1]);
    assert!(matches!(pair.ends(), Err(DriverError::Failed { code: 904, .. })));
    assert_eq!(pair.sim.capture_state(PEER, pair.streams[1]).unwrap(), CaptureState::None);
    // Without work of its own a stream leaves nothing to join.
    pair.begins();
    pair.forks();
    pair.ends().unwrap();
    // What is not allowed on a device breaks the captures that its streams take part in.
    pair.begins();
    pair.forks();
    assert!(matches!(pair.sim.context_synchronize(PEER), Err(DriverError::Capturing { .. })));
    assert!(matches!(pair.ends(), Err(DriverError::Failed { code: 901, .. })));
}
