//! What stands in a stream's queue, and what stands in the way of other streams.

use super::*;

fn bounded(bound: usize) -> Simulator {
    Simulator::new(SimOptions { queue: Some(bound), ..SimOptions::default() }).unwrap()
}

fn busy(sim: &Simulator, stream: Stream) -> Result<()> {
    sim.enqueue_kernel(GPU, stream, &[], &[], US(10), |_| {})
}

#[test]
fn a_full_stream_blocks_its_caller() {
    let sim = bounded(3);
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    (0..3).for_each(|_| busy(&sim, stream).unwrap());
    assert_eq!(sim.now(), US(0));
    busy(&sim, stream).unwrap();
    assert_eq!(sim.now(), US(10), "until one piece of work had run");
    let event = sim.event_create(GPU, EventKind::Plain).unwrap();
    sim.event_record(GPU, event, stream).unwrap();
    assert_eq!(sim.now(), US(20));
    // Others have queues of their own.
    let other = sim.stream_create(GPU, Priority::Normal).unwrap();
    sim.stream_wait_event(GPU, other, event).unwrap();
    assert_eq!(sim.now(), US(20));
}

#[test]
fn a_full_stream_without_progress_is_a_deadlock() {
    let sim = bounded(2);
    let flag = mapped(&sim, 2, &[GPU]);
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    sim.enqueue_wait(GPU, stream, flag, 1).unwrap();
    busy(&sim, stream).unwrap();
    assert!(matches!(busy(&sim, stream), Err(DriverError::Deadlock { .. })));
    let other = sim.stream_create(GPU, Priority::Normal).unwrap();
    sim.enqueue_signal(GPU, other, flag, 1).unwrap();
    busy(&sim, stream).unwrap();
    // What is recorded is not enqueued.
    busy(&sim, stream).unwrap();
    sim.begin_capture(GPU, stream).unwrap();
    let before = sim.now();
    (0..5).for_each(|_| busy(&sim, stream).unwrap());
    assert_eq!(sim.now(), before);
}

#[test]
fn a_full_stream_waits_in_wall_time_too() {
    let options = SimOptions { queue: Some(1), clock: Clock::Wall, ..SimOptions::default() };
    let sim = Simulator::new(options).unwrap();
    let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
    let slow = || sim.enqueue_kernel(GPU, stream, &[], &[], Duration::from_millis(3), |_| {});
    let before = Instant::now();
    slow().unwrap();
    slow().unwrap();
    assert!(before.elapsed() >= Duration::from_millis(3));
}

#[test]
fn the_deepest_queue_behind_a_wait_is_counted() {
    let sim = server(1);
    let flag = mapped(&sim, 2, &[GPU]);
    let [one, two] = [(); 2].map(|()| sim.stream_create(GPU, Priority::Normal).unwrap());
    (0..10).for_each(|_| busy(&sim, one).unwrap());
    assert_eq!(sim.deepest_queue(), 0, "behind no wait");
    let event = sim.event_create(GPU, EventKind::Plain).unwrap();
    sim.event_record(GPU, event, one).unwrap();
    busy(&sim, two).unwrap();
    sim.stream_wait_event(GPU, two, event).unwrap();
    (0..3).for_each(|_| busy(&sim, two).unwrap());
    assert_eq!(sim.deepest_queue(), 3);
    sim.stream_synchronize(GPU, one).unwrap();
    (0..5).for_each(|_| busy(&sim, two).unwrap());
    assert_eq!(sim.deepest_queue(), 3, "the wait had passed");
    sim.reset_deepest_queue();
    assert_eq!(sim.deepest_queue(), 0);
    sim.enqueue_wait(GPU, one, flag, 1).unwrap();
    (0..2).for_each(|_| busy(&sim, one).unwrap());
    assert_eq!(sim.deepest_queue(), 2);
}

/// A server whose contexts have so many queues, and streams of its first GPU.
fn dealt<const N: usize>(queues: u32) -> (Simulator, [Stream; N]) {
    let options = SimOptions { hardware_queues: Some(queues), ..SimOptions::default() };
    let sim = Simulator::new(options).unwrap();
    let streams = [(); N].map(|()| sim.stream_create(GPU, Priority::Normal).unwrap());
    (sim, streams)
}

#[test]
fn waiting_work_delays_other_streams_of_its_queue() {
    let (sim, [one, two, three]) = dealt(2);
    let own = sim.own();
    let ours = own.stream_create(GPU, Priority::Normal).unwrap();
    let flag = mapped(&sim, 2, &[GPU]);
    sim.enqueue_wait(GPU, one, flag, 1).unwrap();
    // The third is dealt onto the queue of the first, the second is not, and other contexts share none.
    busy(&sim, three).unwrap();
    busy(&sim, two).unwrap();
    own.enqueue_kernel(GPU, ours, &[], &[], US(10), |_| {}).unwrap();
    sim.stream_synchronize(GPU, two).unwrap();
    own.stream_synchronize(GPU, ours).unwrap();
    assert!(matches!(sim.stream_synchronize(GPU, three), Err(DriverError::Deadlock { .. })));
    sim.enqueue_signal(GPU, two, flag, 1).unwrap();
    sim.stream_synchronize(GPU, three).unwrap();
}

#[test]
fn work_of_one_queue_begins_in_the_order_of_its_issue() {
    let (sim, [one, two]) = dealt(1);
    // The second kernel waits for the first one of its stream, and holds up the other stream's.
    (0..2).for_each(|_| busy(&sim, one).unwrap());
    busy(&sim, two).unwrap();
    sim.stream_synchronize(GPU, two).unwrap();
    assert_eq!(sim.now(), US(20));
    sim.stream_synchronize(GPU, one).unwrap();
    assert_eq!(sim.now(), US(20), "they ran side by side");
    // Each with a queue of its own.
    let (sim, [one, two]) = dealt(2);
    (0..2).for_each(|_| busy(&sim, one).unwrap());
    busy(&sim, two).unwrap();
    sim.stream_synchronize(GPU, two).unwrap();
    assert_eq!(sim.now(), US(10));
}
