//! Room in an owner's log: what is recorded can be written, where there is no memory for more segments.
//!
//! A change is admitted without a lock while room is not tight, or one by one under both locks of the log, and gives its words back once
//! they are pending. Images of pages are pending if there is room beside all that. One at a time takes what is pending, as a batch
//! without a place, and finds it a place.
//!
//! Asserted: a batch finds as many empty segments as it takes. The log's words, and what it does with them, are the code itself; what is
//! pending and which segments are empty are two numbers of the model's, each behind a lock as in the log.
//!
//! Broken variants: who looks whether room is tight before it adds its words; who gives them back before they are pending; a batch whose words do not
//! count until it has a place, or that has it apart from the segments.

use std::sync::Arc;

use farlink_loom_tests::{Running, Seen, explore, refuse, run};
use farlink_runtime::{
    sync::{Mutex, lock},
    write_ahead::{ADMITTED_WORDS, Admission, Admitted, RESERVE, RESERVED_WORDS},
};

/// Words of a segment.
const SHARE: usize = RESERVED_WORDS / (RESERVE / 2);
/// The most that is admitted at once without a look at what is empty.
const MOST: usize = ADMITTED_WORDS as usize;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    LooksFirst,
    GivesBackFirst,
    TakesWithoutAWord,
    PlacedEarly,
}

struct Log {
    admission: Admission,
    /// Before the segments, where both are locked.
    pending: Mutex<usize>,
    empty: Mutex<usize>,
    wrong: Wrong,
}

impl Log {
    /// With so many empty segments, and so many words pending; not tight.
    fn new(empty: usize, pending: usize, wrong: Wrong) -> Arc<Self> {
        let log = Self { admission: Admission::default(), pending: Mutex::new(0), empty: Mutex::new(empty), wrong };
        drop(log.admission.admit(0, empty, 0));
        assert!(log.admission.has_room());
        *lock(&log.pending) = pending;
        Arc::new(log)
    }

    fn try_admit(&self, words: usize) -> Option<Admitted<'_>> {
        if self.wrong != Wrong::LooksFirst {
            return self.admission.try_admit(words);
        }
        let has_room = self.admission.has_room();
        let (admitted, all) = self.admission.hold(words);
        (has_room && all <= ADMITTED_WORDS).then_some(admitted)
    }

    fn record(&self, admitted: Admitted<'_>, words: usize) {
        let mut admitted = Some(admitted);
        if self.wrong == Wrong::GivesBackFirst {
            admitted = None;
        }
        {
            let mut pending = lock(&self.pending);
            *pending += words;
            self.admission.note_pending(*pending);
        }
        drop(admitted);
    }

    /// Makes a change without waiting; whether it was admitted.
    fn try_change(&self, words: usize) -> bool {
        let Some(admitted) = self.try_admit(words) else { return false };
        self.record(admitted, words);
        true
    }

    /// Makes a change that is admitted under the locks.
    fn change(&self, words: usize) -> bool {
        let admitted = {
            let (pending, empty) = (lock(&self.pending), lock(&self.empty));
            self.admission.admit(*pending, *empty, words)
        };
        let Ok(admitted) = admitted else { return false };
        self.record(admitted, words);
        true
    }

    /// Records an image of so many words, if there is room.
    fn record_image(&self, words: usize) -> bool {
        let (mut pending, empty) = (lock(&self.pending), lock(&self.empty));
        let has_room = self.admission.has_room_for_image(*pending, *empty, words);
        drop(empty);
        if has_room {
            *pending += words;
            self.admission.note_pending(*pending);
        }
        has_room
    }

    /// Takes what is pending.
    fn take(&self) -> usize {
        let mut pending = lock(&self.pending);
        let words = std::mem::take(&mut *pending);
        if self.wrong != Wrong::TakesWithoutAWord {
            self.admission.take(words);
        }
        words
    }

    /// Finds a place for what was taken.
    fn place(&self, words: usize) {
        if self.wrong == Wrong::PlacedEarly {
            self.admission.is_placed();
        }
        let mut empty = lock(&self.empty);
        let needed = words.div_ceil(SHARE);
        assert!(needed <= *empty, "what is recorded has no room: {needed} segments of {}", *empty);
        *empty -= needed;
        self.admission.is_placed();
        // There was no memory to have as many as are kept empty.
        if *empty < RESERVE {
            self.admission.set_tight();
        }
    }
}

fn on(log: &Arc<Log>, does: impl FnOnce(&Log) -> bool + 'static) -> Running<bool> {
    let log = Arc::clone(log);
    run(move || does(&log))
}

/// What two threads do at once while a batch of so many words has no place yet; whether each of them could.
fn both(
    log: &Arc<Log>,
    taken: usize,
    one: impl FnOnce(&Log) -> bool + 'static,
    other: impl FnOnce(&Log) -> bool + 'static,
) -> [bool; 2] {
    let (one, other) = (on(log, one), on(log, other));
    let done = [one.join(), other.join()];
    log.place(taken);
    log.place(log.take());
    done
}

/// One who does not wait, and one who is admitted under the locks, for nearly all there is.
fn two_changes(wrong: Wrong) -> [bool; 2] {
    const EMPTY: usize = 20;
    let log = Log::new(EMPTY, RESERVED_WORDS, wrong);
    let taken = log.take();
    let words = (EMPTY - 2) * SHARE - taken;
    both(&log, taken, |log| log.try_change(MOST), move |log| log.change(words))
}

/// Two who do not wait, of whom the second has made room tight by that, and then records an image, too.
fn change_and_image(wrong: Wrong) -> [bool; 2] {
    let log = Log::new(RESERVE, RESERVED_WORDS, wrong);
    let taken = log.take();
    let change = |log: &Log| log.try_change(MOST - SHARE);
    both(&log, taken, change, |log| log.try_change(SHARE) && log.record_image(RESERVED_WORDS - SHARE))
}

/// One who does not wait, and one who records two images, of which the first makes room tight.
fn change_and_two_images(wrong: Wrong) -> [bool; 2] {
    let log = Log::new(RESERVE, RESERVED_WORDS, wrong);
    let taken = log.take();
    let images = |log: &Log| log.record_image(SHARE) && log.record_image(RESERVED_WORDS - SHARE);
    both(&log, taken, |log| log.try_change(MOST), images)
}

/// A batch that finds its place, and an image of so many segments.
fn batch_and_image(wrong: Wrong, image: usize) -> [bool; 2] {
    let log = Log::new(RESERVE, 10 * SHARE, wrong);
    let write = |log: &Log| {
        let words = log.take();
        log.place(words);
        true
    };
    both(&log, 0, write, move |log| log.record_image(image * SHARE))
}

fn batch_and_fitting_image(wrong: Wrong) -> [bool; 2] {
    batch_and_image(wrong, RESERVE - 10)
}

fn batch_and_large_image(wrong: Wrong) -> [bool; 2] {
    batch_and_image(wrong, RESERVE / 2)
}

type Scene = fn(Wrong) -> [bool; 2];

fn is_sound(name: &str, scene: Scene, happens: &[[bool; 2]]) {
    let seen: Vec<_> = happens.iter().map(|&done| (done, Seen::new())).collect();
    let of_model = seen.clone();
    explore(name, move || {
        let came = scene(Wrong::Nothing);
        of_model.iter().filter(|(done, _)| *done == came).for_each(|(_, seen)| seen.mark());
    });
    for (done, seen) in seen {
        seen.require(&format!("who could: {done:?}"));
    }
}

fn is_caught(name: &str, scene: Scene, wrong: Wrong) {
    refuse(name, "has no room", move || {
        scene(wrong);
    });
}

#[test]
fn what_is_admitted_can_be_written() {
    is_sound("log admission, two changes", two_changes, &[[true, false], [false, true]]);
    is_sound("log admission, a change and an image", change_and_image, &[[true, false], [false, true]]);
    let happens = [[true, false], [false, true]];
    is_sound("log admission, a change and two images", change_and_two_images, &happens);
    is_sound("log admission, a batch and an image", batch_and_fitting_image, &[[true, true], [true, false]]);
    is_sound("log admission, a batch and a large image", batch_and_large_image, &[[true, false]]);
}

#[test]
fn broken_admissions_are_caught() {
    is_caught("log admission, looks first", change_and_image, Wrong::LooksFirst);
    is_caught("log admission, given back first", two_changes, Wrong::GivesBackFirst);
    is_caught("log admission, taken without a word", batch_and_large_image, Wrong::TakesWithoutAWord);
    is_caught("log admission, placed early", batch_and_large_image, Wrong::PlacedEarly);
}
