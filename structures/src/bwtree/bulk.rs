//! Bulk load: pages are filled level by level and written from right to left, each before anything leads to it. The last step
//! makes the root lead there; until then the tree is empty for everybody. All of it is a task of the worker, which takes back what it
//! has written if it fails.

use farlink_runtime::{
    access::*,
    error::Error,
    one_sided::{OneSided, Proof},
    operation::retry,
};

use super::{
    Bw,
    chain::State,
    page::{Found, View, find},
    record::{About, Fences, Pid, capacity},
    split::Created,
};

/// Loads entries in strictly ascending key order into the empty tree; `fill` is the share of each page to use.
pub(super) async fn load<A: Access<Plugin = Bw>>(
    access: &A,
    entries: impl IntoIterator<Item = (u64, u64)>,
    fill: f64,
) -> Result<u64, Error> {
    if !(0.1..=1.0).contains(&fill) {
        return Err(Error::BadOption { option: "fill", why: format!("{fill}; a page is filled from 0.1 to 1.0") });
    }
    let mut row: Vec<(u64, u64)> = Vec::new();
    for (position, (key, value)) in (0..).zip(entries) {
        if row.last().is_some_and(|last| key <= last.0) {
            return Err(Error::NotSorted { position, key });
        }
        row.push((key, value));
    }
    let Context { worker, structure, .. } = access.context();
    let (access, pin) = (OneSided::<Bw>::new(worker, structure.clone(), Proof::Checksum), worker.pin());
    let whole = async move {
        let (worker, mut made, mut may_be_linked) = (&access.context().worker, Vec::new(), false);
        let outcome = retry(worker, async || {
            let root = empty_root(&access).await?;
            build(&access, root, &row, fill, &mut made, &mut may_be_linked).await
        })
        .await;
        for page in made {
            if let Err(error) = page.undo(&access, may_be_linked).await {
                tracing::warn!(%error, "a page of a failed bulk load was not freed");
            }
        }
        drop(pin);
        outcome.map(|()| row.len() as u64)
    };
    worker.spawn_to_end(whole).await
}

async fn empty_root<A: Access<Plugin = Bw>>(access: &A) -> Result<View, Interrupt> {
    match find(access, Pid::ROOT).await? {
        Found::Page(root) if root.level() == 0 && root.state.entries.is_empty() => Ok(root),
        _ => Err(Error::NotEmpty.into()),
    }
}

/// Writes the pages, and makes the root lead there; says so before.
async fn build<A: Access<Plugin = Bw>>(
    access: &A,
    root: View,
    entries: &[(u64, u64)],
    fill: f64,
    made: &mut Vec<Created>,
    may_be_linked: &mut bool,
) -> Result<(), Interrupt> {
    let (structure, earlier) = (&access.context().structure, made.len());
    let room = capacity(structure.class);
    let each = ((room as f64 * fill) as usize).clamp(2.min(room), room);
    let (mut row, mut level) = (entries.to_vec(), 0u8);
    while row.len() > each {
        let (mut above, mut right) = (Vec::new(), None);
        for (index, entries) in row.chunks(each).enumerate().rev() {
            let low = if index == 0 { 0 } else { entries[0].0 };
            let about = About { pid: Pid::ROOT, level, below: 0 };
            let state = State { entries: entries.to_vec(), ..State::new(about, Fences { low, right }) };
            let page = Created::beside(access, state, structure.root).await?;
            right = Some((low, page.pid));
            above.push((low, page.pid.word()));
            made.push(page);
        }
        above.reverse();
        (row, level) = (above, level.saturating_add(1));
    }
    let about = About { pid: Pid::ROOT, level, below: 0 };
    let full = State { entries: row, ..State::new(about, Fences::ALL) };
    *may_be_linked = true;
    root.replace(access, full, &[]).await?.map_err(|_| Interrupt::conflict())?;
    made.truncate(earlier);
    Ok(())
}
