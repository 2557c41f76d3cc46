//! Replays a trace: one operation after the other by one worker, counted, each answer handed out as it comes.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use farlink_runtime::compute::ComputeServer;

use crate::driver::{self, Client};
use crate::host;
use crate::owner::{Owner as _, Share};
use crate::place::Place;
use crate::plan::Plan;
use crate::signals;
use crate::subject::{Answer, Outcomes, Subject};
use crate::tally::Tally;

/// Operations to replay.
pub(crate) trait Trace {
    /// Runs them one after the other, and hands out what each answers.
    fn replay(
        &self,
        plan: &Plan,
        place: &Place,
        hand_out: &mut dyn FnMut(Answer) -> anyhow::Result<()>,
    ) -> anyhow::Result<(f64, Tally)>;
}

/// Lines, and the operations that they mean.
pub(crate) struct TraceOf<S: Subject>(pub(crate) Vec<(String, S::Request)>);

impl<S: Subject> Trace for TraceOf<S> {
    fn replay(
        &self,
        plan: &Plan,
        place: &Place,
        hand_out: &mut dyn FnMut(Answer) -> anyhow::Result<()>,
    ) -> anyhow::Result<(f64, Tally)> {
        let compute = ComputeServer::join(plan.fabric(place)?, plan.compute_options(plan.setting.seed))?;
        let (compute, data) = (Arc::new(compute), S::data(&plan.setting)?);
        let mut route = host::route::<S>(plan, &data, &compute)?;
        let mut owner = None;
        if plan.has_owners() {
            route = route.among_owners()?;
            let mut share = Share::start(plan, 0, &route, &data, &compute)?;
            if !plan.joins_owners {
                share.take_all()?;
            }
            // What it does from now on is counted.
            share.prepare(true)?;
            owner = Some(share);
        }
        let worker = compute.worker()?;
        // Dropped before what it is about.
        let client = [Client { access: route.open(&worker)?, worker }];
        let [Client { access, worker }] = &client;
        worker.block_on(access.enter())?;
        let mut seconds = 0.0;
        let tally = driver::counted(&client, || {
            let mut tally = Tally::default();
            for (number, (line, request)) in (1u64..).zip(&self.0) {
                ensure!(
                    signals::stopped().is_none(),
                    "operation {number}, `{line}`, and what comes after were not begun"
                );
                let start = Instant::now();
                let answer = worker.block_on(access.answer(*request));
                let took = start.elapsed();
                let answer = answer.with_context(|| format!("operation {number}, `{line}`"))?;
                let scanned = answer.results();
                hand_out(answer)?;
                tally.latency.record(took.as_nanos() as u64);
                tally.outcomes += Outcomes { ops: 1, scanned, ..Outcomes::default() };
                seconds += took.as_secs_f64();
            }
            Ok(tally)
        });
        // Also after an error: what was changed in the cache alone would leave the structure in pieces.
        let flushed = driver::counted(&client, || {
            worker.block_on(access.flush())?;
            Ok(Tally::default())
        })?;
        let owned = owner.as_mut().map_or_else(|| Ok(Tally::default()), |share| share.flush())?;
        let mut tally = tally?;
        tally.cache.flushed = flushed.cache.write_backs;
        tally += &owned;
        Ok((seconds, tally))
    }
}
