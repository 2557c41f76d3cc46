//! The program `farlink` for counters: `serve`, `bench`, `check`, `list`, `drop`.

fn main() -> std::process::ExitCode {
    farlink_bench::main(&[farlink_bench::plugin::<counter_set::CounterSet>()])
}
