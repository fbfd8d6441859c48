//! The look of `top`: totals, pools, and a row for each request.

use std::fmt::Write;
use std::time::Duration;

use plimsoll_memory::Bytes;
use ratatui::Frame;
use ratatui::crossterm::event::KeyCode;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, LineGauge, Paragraph, Row as TableRow, Table, TableState};

use super::status::{Pool, Row, Status};

/// Order of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Age,
    Memory,
    Speed,
}

/// The last status and how it is shown.
pub struct View {
    status: Status,
    /// Why the last fetch failed; none if it succeeded.
    error: Option<String>,
    order: Order,
    selected: TableState,
}

/// Width of the terminal, in characters, from which all columns of the table are shown.
const WIDE: u16 = 100;

/// Places in [`COLUMNS`].
const ENDPOINT: usize = 1;
const PROMPT: usize = 4;

const COLUMNS: [(&str, Constraint); 8] = [
    ("REQUEST", Constraint::Fill(2)),
    ("ENDPOINT", Constraint::Fill(1)),
    ("PHASE", Constraint::Length(9)),
    ("AGE", Constraint::Length(8)),
    ("PROMPT (CACHED)", Constraint::Length(16)),
    ("OUT", Constraint::Length(7)),
    ("TOK/S", Constraint::Length(7)),
    ("MEMORY", Constraint::Length(10)),
];

impl View {
    pub fn new(status: Status) -> Self {
        let mut view = Self { status, error: None, order: Order::Age, selected: TableState::default() };
        view.sort();
        view
    }

    /// Takes the next status, or the error of a failed fetch.
    pub fn take(&mut self, look: anyhow::Result<Status>) {
        match look {
            Ok(status) => {
                self.error = None;
                self.status = status;
                self.sort();
            }
            Err(error) => self.error = Some(format!("{error:#}")),
        }
    }

    /// Handles a key that does not end the view.
    pub fn press(&mut self, key: KeyCode) {
        match key {
            KeyCode::Char('a') => self.order = Order::Age,
            KeyCode::Char('m') => self.order = Order::Memory,
            KeyCode::Char('t') => self.order = Order::Speed,
            KeyCode::Down | KeyCode::Char('j') => self.selected.select_next(),
            KeyCode::Up | KeyCode::Char('k') => self.selected.select_previous(),
            _ => {}
        }
        self.sort();
    }

    fn sort(&mut self) {
        let key = |row: &Row| match self.order {
            Order::Age => row.age_seconds,
            Order::Memory => row.memory_bytes as f64,
            Order::Speed => row.tokens_per_second.unwrap_or(0.0),
        };
        self.status.requests.sort_by(|a, b| key(b).total_cmp(&key(a)));
    }

    /// Draws the view.
    pub fn draw(&mut self, frame: &mut Frame<'_>) {
        let pools = pools(&self.status);
        let heights = [
            Constraint::Length(2),
            Constraint::Length(pools.len() as u16),
            Constraint::Length(1),
            Constraint::Fill(1),
            Constraint::Length(1),
        ];
        let [head, gauges, _, table, foot] = Layout::vertical(heights).areas(frame.area());
        frame.render_widget(Paragraph::new(self.head()), head);
        draw_pools(frame, gauges, &pools);
        // A narrow terminal has no room for the endpoint and the prompt.
        let shown = |column: &usize| table.width >= WIDE || ![ENDPOINT, PROMPT].contains(column);
        let columns: Vec<usize> = (0..COLUMNS.len()).filter(shown).collect();
        let of_row = |row: &Row| {
            let cells = cells(row);
            TableRow::new(columns.iter().map(|column| Cell::from(cells[*column].clone())).collect::<Vec<_>>())
        };
        let rows = self.status.requests.iter().map(of_row);
        let header = TableRow::new(columns.iter().map(|column| COLUMNS[*column].0)).style(Style::new().reversed());
        let table_of_requests = Table::new(rows, columns.iter().map(|column| COLUMNS[*column].1))
            .header(header)
            .row_highlight_style(Style::new().bold().fg(Color::Cyan));
        frame.render_stateful_widget(table_of_requests, table, &mut self.selected);
        let keys = "q quit   up/down move   sort by a age, m memory, t tokens/s";
        let foot_line = match &self.error {
            Some(error) => Line::from(format!("{error}; trying again")).fg(Color::Red),
            None => Line::from(keys).fg(Color::DarkGray),
        };
        frame.render_widget(foot_line, foot);
    }

    fn head(&self) -> Vec<Line<'static>> {
        let Status { model, degradation, .. } = &self.status;
        let state = match state(&self.status) {
            "healthy" => Span::from("healthy").fg(Color::Green),
            other => Span::from(other).fg(Color::Red),
        };
        let level = match degradation.level.as_str() {
            "calm" => Span::from("calm").fg(Color::Green),
            other => Span::from(other.to_owned()).fg(Color::Yellow),
        };
        let up = age(self.status.uptime_seconds);
        let first = vec![
            Span::from(format!("plimsoll {model}")).bold(),
            Span::from(format!("   up {up}   ")),
            state,
            Span::from("   "),
            level,
        ];
        vec![first.into(), Line::from(totals(&self.status))]
    }
}

/// A status as text.
pub fn text(status: &Status) -> String {
    let mut text = format!(
        "plimsoll {}   up {}   {}   {}\n{}\n",
        status.model,
        age(status.uptime_seconds),
        state(status),
        status.degradation.level,
        totals(status)
    );
    for (name, pool) in pools(status) {
        let _ = writeln!(text, "{name:<16} {}", used(name, pool));
    }
    for row in &status.requests {
        let _ = write!(text, "\n{}", cells(row).join("  "));
    }
    text
}

fn state(status: &Status) -> &'static str {
    match (status.healthy, status.draining) {
        (_, true) => "draining",
        (true, false) => "healthy",
        (false, false) => "NOT HEALTHY",
    }
}

fn totals(status: &Status) -> String {
    let t = &status.totals;
    format!(
        "{} running, {} waiting, {:.1} tokens/s, {} held; {} finished, {} aborted, {} failed",
        t.running,
        t.waiting,
        t.tokens_per_second,
        Bytes(t.memory_bytes),
        t.finished,
        t.aborted,
        t.failed
    )
}

/// The pools that the server has.
fn pools(status: &Status) -> Vec<(&str, &Pool)> {
    let there = status.pools.iter().filter(|(_, pool)| pool.total > 0);
    there.map(|(name, pool)| (name.as_str(), pool)).collect()
}

/// How much of a pool is used.
fn used(name: &str, pool: &Pool) -> String {
    let amount = |n: u64| if name.ends_with("_bytes") { Bytes(n).to_string() } else { n.to_string() };
    let cached = if pool.cached > 0 { format!(", {} cached", amount(pool.cached)) } else { String::new() };
    format!("{} of {}{cached}", amount(pool.used), amount(pool.total))
}

fn draw_pools(frame: &mut Frame<'_>, area: Rect, pools: &[(&str, &Pool)]) {
    let lines = Layout::vertical(pools.iter().map(|_| Constraint::Length(1))).split(area);
    for (line, (name, pool)) in lines.iter().zip(pools) {
        let ratio = (pool.used as f64 / pool.total as f64).clamp(0.0, 1.0);
        let color = if ratio > 0.9 { Color::Yellow } else { Color::Blue };
        let [label, gauge] = Layout::horizontal([Constraint::Length(46), Constraint::Fill(1)]).areas(*line);
        frame.render_widget(Line::from(format!("{name:<16} {}", used(name, pool))), label);
        frame.render_widget(LineGauge::default().ratio(ratio).filled_style(Style::new().fg(color)), gauge);
    }
}

fn cells(row: &Row) -> [String; COLUMNS.len()] {
    // During prefill, the column shows computed and total prompt tokens.
    let prompt = match row.computed_tokens < row.prompt_tokens {
        true => format!("{}/{}", row.computed_tokens, row.prompt_tokens),
        false => row.prompt_tokens.to_string(),
    };
    [
        row.id.clone(),
        row.endpoint.clone(),
        row.phase.clone(),
        age(row.age_seconds),
        if row.cached_tokens > 0 { format!("{prompt} ({})", row.cached_tokens) } else { prompt },
        row.generated_tokens.to_string(),
        row.tokens_per_second.map_or_else(|| "-".into(), |speed| format!("{speed:.1}")),
        Bytes(row.memory_bytes).to_string(),
    ]
}

/// A duration in its two largest units.
fn age(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds).unwrap_or_default().as_secs();
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} m {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} m", whole / 3600, whole / 60 % 60),
        _ => format!("{} d {} h", whole / 86_400, whole / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;

    fn status() -> Status {
        let row = |id: &str, age: f64, memory: u64| {
            json!({"id": id, "endpoint": "/v1/chat/completions", "phase": "decode", "prompt_tokens": 30,
                "computed_tokens": 30, "cached_tokens": 16, "generated_tokens": 7, "memory_bytes": memory,
                "age_seconds": age, "tokens_per_second": 12.5, "a_field_of_a_later_release": 1})
        };
        let page = json!({"model": "smollm2", "uptime_seconds": 3723.0, "healthy": true,
            "totals": {"running": 2, "waiting": 1, "tokens_per_second": 25.0, "memory_bytes": 3 << 20, "finished": 9},
            "pools": {"kv_pages": {"used": 95, "total": 100, "cached": 3}, "http_bytes": {"used": 0, "total": 1 << 20},
                "state_slots": {"used": 0, "total": 0}, "requests": {"running": 2, "waiting": 1}},
            "degradation": {"level": "evict_prefix"},
            "requests": [row("chatcmpl-old", 75.0, 1 << 20), row("chatcmpl-large", 2.5, 2 << 20)]});
        serde_json::from_value(page).expect("a status")
    }

    fn drawn(view: &mut View, width: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 12)).expect("a terminal");
        terminal.draw(|frame| view.draw(frame)).expect("a frame");
        let buffer = terminal.backend().buffer();
        let lines = buffer.content.chunks(width.into()).map(|line| line.iter().map(|cell| cell.symbol()).collect());
        lines.collect::<Vec<String>>().join("\n")
    }

    #[test]
    fn totals_pools_and_requests_are_shown() {
        let page = drawn(&mut View::new(status()), 130);
        for part in [
            "plimsoll smollm2   up 1 h 2 m   healthy   evict_prefix",
            "2 running, 1 waiting, 25.0 tokens/s, 3.0 MiB held; 9 finished, 0 aborted, 0 failed",
            "kv_pages         95 of 100, 3 cached",
            "http_bytes       0 B of 1.0 MiB",
            "chatcmpl-old",
            "1 m 15 s",
            "30 (16)",
            "12.5",
            "2.0 MiB",
        ] {
            assert!(page.contains(part), "{part}:\n{page}");
        }
        assert!(!page.contains("state_slots"), "a pool that the model does not have is not shown:\n{page}");
    }

    #[test]
    fn keys_sort_and_an_error_keeps_the_last_look() {
        let mut view = View::new(status());
        let first = |view: &View| view.status.requests[0].id.clone();
        assert_eq!(first(&view), "chatcmpl-old");
        view.press(KeyCode::Char('m'));
        assert_eq!(first(&view), "chatcmpl-large");
        view.take(Err(anyhow::anyhow!("no connection")));
        let page = drawn(&mut view, 130);
        assert!(page.contains("no connection; trying again") && page.contains("chatcmpl-old"), "{page}");
        view.take(Ok(Status::default()));
        assert!(!drawn(&mut view, 130).contains("chatcmpl-old"));
    }

    #[test]
    fn small_terminals_do_not_panic() {
        for width in [1, 20, 60] {
            drawn(&mut View::new(status()), width);
        }
    }

    #[test]
    fn text_has_the_same_facts() {
        let text = text(&status());
        for part in ["smollm2", "95 of 100, 3 cached", "chatcmpl-large", "2 running"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
