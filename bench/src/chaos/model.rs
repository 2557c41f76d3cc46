//! What each key can be, by what was acknowledged.

use std::collections::HashMap;

use crate::victim::Change;

#[derive(Debug, Default)]
struct Key {
    /// What it is, as was acknowledged last.
    last: Option<u64>,
    /// What it may be instead: operations were cut off, or what was not flushed is lost.
    also: Vec<Option<u64>>,
    /// What it was since its owner's last flush, where that counts.
    unflushed: Vec<Option<u64>>,
    /// What it may be at any later time, once: operations were cut off that their process had perhaps sent to a memory server or an owner,
    /// which may carry them out after operations that began later.
    late: Vec<Option<u64>>,
    process: usize,
}

/// All keys. One that was never used is not there.
#[derive(Debug)]
pub(super) struct Model {
    keys: HashMap<u64, Key>,
    under_way: HashMap<(usize, u32), (u64, Change)>,
    /// Whether what was not flushed is lost with its process.
    writes_back: bool,
    /// Whether memory servers or owners carry out operations of others.
    sends: bool,
}

impl Model {
    pub(super) fn new(writes_back: bool, sends: bool) -> Self {
        Self { keys: HashMap::new(), under_way: HashMap::new(), writes_back, sends }
    }

    pub(super) fn begin(&mut self, process: usize, task: u32, key: u64, change: Change) {
        self.under_way.insert((process, task), (key, change));
        self.keys.entry(key).or_default().process = process;
    }

    /// The operation of this task saw that its key was so; what is wrong with that.
    pub(super) fn end(&mut self, process: usize, task: u32, seen: Option<u64>) -> Option<String> {
        let (key, change) = self.under_way.remove(&(process, task))?;
        let problem = self.found(key, seen);
        let state = self.keys.entry(key).or_default();
        let after = change.of(seen);
        // What came late has come now, and does not come again.
        if seen != state.last
            && !state.also.contains(&seen)
            && let Some(come) = state.late.iter().position(|late| *late == seen)
        {
            state.late.swap_remove(come);
        }
        state.also.clear();
        if self.writes_back {
            state.unflushed.extend([seen, after]);
        }
        state.last = after;
        problem
    }

    /// The operation of this task has failed: it may have taken effect, or takes it later where somebody else was to carry it out.
    pub(super) fn fail(&mut self, process: usize, task: u32) {
        self.cut_off(process, task, self.sends);
    }

    /// The operation of this task was lost with the owner that was to carry it out: it has taken effect or never does.
    pub(super) fn lost(&mut self, process: usize, task: u32) {
        self.cut_off(process, task, false);
    }

    fn cut_off(&mut self, process: usize, task: u32, may_come_late: bool) {
        let Some((key, change)) = self.under_way.remove(&(process, task)) else { return };
        let state = self.keys.entry(key).or_default();
        if change != Change::Nothing {
            let may_be = if may_come_late { &mut state.late } else { &mut state.also };
            may_be.push(change.of(None));
        }
    }

    /// All that the process was answered is safe; none of its operations is under way.
    pub(super) fn flushed(&mut self, process: usize) {
        self.keys.values_mut().filter(|key| key.process == process).for_each(|key| key.unflushed.clear());
    }

    /// The process is gone.
    pub(super) fn killed(&mut self, process: usize) {
        let tasks: Vec<u32> = self.under_way.keys().filter(|(of, _)| *of == process).map(|&(_, task)| task).collect();
        tasks.into_iter().for_each(|task| self.fail(process, task));
        for key in self.keys.values_mut().filter(|key| key.process == process) {
            let lost = std::mem::take(&mut key.unflushed);
            key.also.extend(lost);
        }
    }

    /// A key is so; what is wrong with that.
    pub(super) fn found(&self, key: u64, seen: Option<u64>) -> Option<String> {
        let (last, also, late) =
            self.keys.get(&key).map_or((None, &[][..], &[][..]), |state| (state.last, &state.also, &state.late));
        let is_right = seen == last || also.contains(&seen) || late.contains(&seen);
        let shown = |value: Option<u64>| value.map_or_else(|| "nothing".to_owned(), |value| value.to_string());
        (!is_right).then(|| {
            format!(
                "key {key} has {}, where {} was acknowledged ({} others would do)",
                shown(seen),
                shown(last),
                also.len() + late.len()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(model: &mut Model, value: u64, seen: Option<u64>) -> Option<String> {
        model.begin(0, 0, 7, Change::Put(value));
        model.end(0, 0, seen)
    }

    #[test]
    fn what_was_acknowledged_stays() {
        let mut model = Model::new(false, false);
        assert_eq!(put(&mut model, 1, None), None);
        assert!(put(&mut model, 2, None).unwrap().contains("has nothing, where 1 was acknowledged"));
        model.begin(0, 0, 7, Change::Remove);
        model.killed(0);
        assert_eq!((model.found(7, Some(2)), model.found(7, None)), (None, None));
        assert!(model.found(7, Some(1)).is_some());
        // The next answer says which it was.
        assert_eq!(put(&mut model, 3, None), None);
        model.begin(0, 0, 7, Change::Nothing);
        assert!(model.end(0, 0, Some(2)).is_some());
        assert_eq!(model.found(8, None), None);
        assert!(model.found(8, Some(1)).is_some());
    }

    #[test]
    fn only_what_was_not_flushed_is_lost() {
        let mut model = Model::new(true, false);
        put(&mut model, 1, None);
        put(&mut model, 2, Some(1));
        model.flushed(0);
        put(&mut model, 3, Some(2));
        put(&mut model, 4, Some(3));
        model.killed(0);
        assert!([2, 3, 4].iter().all(|&value| model.found(7, Some(value)).is_none()));
        assert!(model.found(7, Some(1)).is_some() && model.found(7, None).is_some());
    }

    #[test]
    fn what_was_sent_to_a_memory_server_may_come_late() {
        for sends in [false, true] {
            let mut model = Model::new(false, sends);
            put(&mut model, 1, None);
            model.begin(0, 0, 7, Change::Put(2));
            model.killed(0);
            assert_eq!(put(&mut model, 3, Some(1)), None);
            assert_eq!(model.found(7, Some(2)).is_none(), sends);
            assert!(model.found(7, Some(1)).is_some() && model.found(7, None).is_some());
        }
    }

    #[test]
    fn what_was_lost_with_an_owner_does_not_come_late() {
        let mut model = Model::new(false, true);
        put(&mut model, 1, None);
        model.begin(0, 0, 7, Change::Put(2));
        model.lost(0, 0);
        assert!([1, 2].iter().all(|&value| model.found(7, Some(value)).is_none()));
        assert_eq!(put(&mut model, 3, Some(1)), None);
        assert!(model.found(7, Some(2)).is_some());
    }

    #[test]
    fn what_came_late_does_not_come_again() {
        for (change, late) in [(Change::Put(2), Some(2)), (Change::Remove, None)] {
            let mut model = Model::new(false, true);
            put(&mut model, 1, None);
            model.begin(0, 0, 7, change);
            model.killed(0);
            assert_eq!(put(&mut model, 3, Some(1)), None);
            assert_eq!(put(&mut model, 4, late), None);
            assert!(model.found(7, late).is_some());
        }
    }
}
