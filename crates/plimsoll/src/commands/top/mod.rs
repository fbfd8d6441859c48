//! `top`: shows a server's requests, pools and totals in the terminal.

mod status;
mod view;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::Context;
use plimsoll_bench::client::{Target, client_runtime};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::runtime::Runtime;

use crate::args::TopArgs;
use crate::output::say;
use status::Status;
use view::View;

/// The server answers within this time.
const WITHIN: Duration = Duration::from_secs(5);

/// Shows the server's status until a key ends the view. Without a terminal, or with `--once`, prints it once.
pub fn run(args: &TopArgs) -> anyhow::Result<()> {
    let target = Target::parse(&args.url, args.keys.first()?.as_deref())?;
    let runtime = client_runtime()?;
    // An unreachable server is an error before the screen changes.
    let first = look(&runtime, &target)?;
    if args.once || !std::io::stdout().is_terminal() {
        say!("{}", view::text(&first));
        return Ok(());
    }
    let mut terminal = ratatui::try_init().context("preparing the terminal")?;
    let ended = watch(&mut terminal, Duration::from_secs(args.interval), View::new(first), || look(&runtime, &target));
    ratatui::restore();
    ended
}

fn look(runtime: &Runtime, target: &Target) -> anyhow::Result<Status> {
    runtime.block_on(async {
        let answer = target.get("/v1/status", WITHIN).await?.good().await?.json().await?;
        serde_json::from_value(answer)
            .with_context(|| format!("{}: the answer of /v1/status cannot be read", target.authority))
    })
}

/// Draws the status and fetches it again after each interval. A failed fetch is shown beside the last good status, and repeated.
fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    interval: Duration,
    mut view: View,
    look: impl Fn() -> anyhow::Result<Status>,
) -> anyhow::Result<()> {
    loop {
        let next = Instant::now() + interval;
        loop {
            terminal.draw(|frame| view.draw(frame))?;
            let Some(left) = next.checked_duration_since(Instant::now()) else { break };
            if !event::poll(left)? {
                break;
            }
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release && ends(key) => return Ok(()),
                Event::Key(key) if key.kind != KeyEventKind::Release => view.press(key.code),
                _ => {}
            }
        }
        view.take(look());
    }
}

fn ends(key: KeyEvent) -> bool {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) || control && key.code == KeyCode::Char('c')
}
