//! Messages, WRITEs that notify, and inboxes that sleep.

use std::time::Duration;

use farlink_runtime::{
    error::Error,
    fabric::verbs::{
        DeviceChoice, Reliability,
        messages::{Arrival, Inbox, InboxOptions, Line},
    },
    wire::{Wire, decode_all},
};

use crate::scene::{self, eventually};

const LONG: Duration = Duration::from_secs(10);

fn inbox(options: InboxOptions) -> Inbox {
    Inbox::open(&DeviceChoice::default(), options).unwrap()
}

/// Sent as others would send it.
fn sent<T: Wire>(value: T) -> T {
    let mut words = Vec::new();
    value.encode(&mut words);
    decode_all(&words).unwrap()
}

fn line_between(one: &Inbox, other: &Inbox) -> (Line, Line) {
    let (mut here, mut there) = (one.line().unwrap(), other.line().unwrap());
    here.connect(&sent(there.address())).unwrap();
    there.connect(&sent(here.address())).unwrap();
    (here, there)
}

/// Sleeps for the next arrival.
fn next(inbox: &mut Inbox, bytes: &mut Vec<u8>) -> Arrival {
    let mut arrival = None;
    eventually("something arrives", || {
        arrival = inbox.receive(bytes).unwrap();
        arrival.is_some() || {
            inbox.sleep(LONG).unwrap();
            false
        }
    });
    arrival.unwrap()
}

fn send(line: &mut Line, message: &[u8]) {
    eventually("there is room for a message", || line.send(message).unwrap());
}

#[test]
fn messages_of_many_lines_share_one_queue_and_keep_their_order() {
    if !scene::has_device() {
        return;
    }
    const LINES: usize = 8;
    const EACH: u32 = 50;
    let mut server = inbox(InboxOptions { slots: 16, ..InboxOptions::default() });
    let client = inbox(InboxOptions::default());
    let (mut lines, ends): (Vec<_>, Vec<_>) = (0..LINES).map(|_| line_between(&client, &server)).unzip();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..EACH {
                for (number, line) in lines.iter_mut().enumerate() {
                    // Short ones travel inline, long ones do not.
                    let mut message = vec![number as u8; if round % 2 == 0 { 12 } else { 1000 }];
                    message[..4].copy_from_slice(&round.to_le_bytes());
                    send(line, &message);
                }
            }
            for line in &mut lines {
                eventually("all messages have arrived", || line.poll().unwrap() == 0);
            }
        });
        let (mut rounds, mut bytes) = ([0; LINES], Vec::new());
        for _ in 0..LINES as u32 * EACH {
            let Arrival::Message { line } = next(&mut server, &mut bytes) else { panic!("not a message") };
            let end = ends.iter().position(|end| end.number() == line).unwrap();
            assert_eq!(bytes[..4], u32::to_le_bytes(rounds[end]));
            assert_eq!(bytes.len(), if rounds[end] % 2 == 0 { 12 } else { 1000 });
            assert!(bytes[4..].iter().all(|&byte| byte == end as u8));
            rounds[end] += 1;
        }
    });
    let mut bytes = Vec::new();
    assert_eq!(server.receive(&mut bytes).unwrap(), None);
    assert!(!server.sleep(Duration::from_millis(1)).unwrap());
}

#[test]
fn a_write_that_notifies_is_there_when_it_is_announced() {
    if !scene::has_device() {
        return;
    }
    let mut server = inbox(InboxOptions::default());
    let client = inbox(InboxOptions::default());
    let (mut line, end) = line_between(&client, &server);
    let window = server.window(64).unwrap();
    let there = sent(window.address());
    let mut bytes = Vec::new();
    for round in 1..=20u32 {
        let words = [u64::from(round); 8];
        let written: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert!(line.write_notify(&there, 64 * u64::from(round % 8), &written, round).unwrap());
        let arrival = next(&mut server, &mut bytes);
        assert_eq!(arrival, Arrival::Written { line: end.number(), number: round, bytes: 64 });
        assert!((0..8).all(|index| window.load(round as usize % 8 * 8 + index) == u64::from(round)));
    }
    for at in [1, 505, 512, u64::MAX] {
        assert!(matches!(line.write_notify(&there, at, &[1], 1), Err(Error::BadOption { .. })), "at {at}");
    }
    // The window's owner takes it away.
    drop(window);
    line.write_notify(&there, 0, &[1], 1).unwrap();
    eventually("the writer learns it", || line.poll().is_err());
    assert!(line.send(b"more").unwrap_err().to_string().contains("refused the access"));
}

#[test]
fn a_full_line_and_a_long_message_are_refused() {
    if !scene::has_device() {
        return;
    }
    let options = InboxOptions { slots: 4, message_bytes: 64, line_depth: 4, ..InboxOptions::default() };
    let mut server = inbox(options);
    let client = inbox(options);
    let mut line = client.line().unwrap();
    assert!(matches!(line.send(b"early"), Err(Error::LineBroken { .. })));
    drop(line);
    let (mut line, mut end) = line_between(&client, &server);
    assert!(matches!(line.send(&[0; 65]), Err(Error::BadOption { .. })));
    assert!(end.connect(&line.address()).is_err());
    // Nobody receives: four are taken in, and then messages wait on this side.
    let mut taken = 0u8;
    while line.send(&[taken]).unwrap() {
        taken += 1;
        assert!(taken <= 8);
        if taken == 4 {
            eventually("four messages are there", || line.poll().unwrap() == 0);
        }
    }
    let mut bytes = Vec::new();
    for number in 0..taken {
        next(&mut server, &mut bytes);
        assert_eq!(bytes, [number]);
    }
    eventually("the rest has arrived", || line.poll().unwrap() == 0);
}

#[test]
fn a_line_whose_other_side_is_gone_breaks_and_the_inbox_goes_on() {
    if !scene::has_device() {
        return;
    }
    let options = InboxOptions {
        slots: 4,
        reliability: Reliability { answer_within: Duration::from_millis(1), retries: 3 },
        ..InboxOptions::default()
    };
    let mut server = inbox(options);
    let client = inbox(options);
    // More often than there are buffers: none is lost.
    for round in 0..10u8 {
        let (mut line, end) = line_between(&client, &server);
        send(&mut line, &[round]);
        let mut bytes = Vec::new();
        next(&mut server, &mut bytes);
        assert_eq!(bytes, [round]);
        drop(end);
        line.send(b"into the void").unwrap();
        eventually("the line breaks", || line.poll().is_err());
        assert!(line.send(b"more").unwrap_err().to_string().contains("did not answer"));
    }
}
