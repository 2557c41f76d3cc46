//! Other programs, and what is said when they fail.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs a command whose output matters only if it fails.
pub(super) fn run(command: &mut Command) -> Result<()> {
    output_of(command).map(drop)
}

/// What a command prints.
pub(super) fn output_of(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("starting {name}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(if output.stderr.is_empty() { &output.stdout } else { &output.stderr });
        bail!("{name} failed ({}): {}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
