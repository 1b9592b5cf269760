//! Runs other programs: each with a log file, one line on the screen, and the tail of the log when it fails.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

/// How many lines of a failed step's log are shown.
const TAIL: usize = 25;

/// Where progress is shown.
#[derive(Clone)]
pub struct Ui {
    terminal: bool,
    /// Set inside a test step: jobs then have no line of their own.
    step: Option<String>,
}

impl Ui {
    /// A line for each job; moving progress where standard error is a terminal.
    pub fn new() -> Self {
        Self { terminal: io::stderr().is_terminal() && io::stdout().is_terminal(), step: None }
    }

    /// The same, for the jobs of one step that prints its own line.
    pub fn inside(&self, step: &str) -> Self {
        Self { step: Some(step.into()), ..self.clone() }
    }

    /// One line of plain text, unless inside a step.
    pub fn say(&self, text: &str) {
        if self.step.is_none() {
            println!("{text}");
        }
    }

    /// Announces work that may take long where nothing moving can be shown; `done` ends the line.
    pub fn begin(&self, title: &str) {
        if !self.terminal && self.step.is_none() {
            print!("{title} ... ");
            let _ = io::stdout().flush();
        }
    }

    /// Ends the line of `begin`.
    pub fn done(&self, title: &str, outcome: &str) {
        match (&self.step, self.terminal) {
            (None, true) => println!("{title} ... {outcome}"),
            (None, false) => println!("{outcome}"),
            (Some(_), _) => {}
        }
    }

    fn bar(&self, title: &str) -> ProgressBar {
        if !self.terminal {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(100);
        let style = "{spinner} {msg} {bar:30} {percent:>3}% {elapsed}";
        bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
        bar.set_message(self.step.as_ref().map_or_else(|| title.into(), |step| format!("{step}: {title}")));
        bar.enable_steady_tick(Duration::from_millis(120));
        bar
    }
}

/// One program to run.
pub struct Job {
    title: String,
    command: Command,
    log: PathBuf,
    percent: fn(&str) -> Option<u8>,
}

/// The percentage in a line of `make`: `[ 53%] Building …`.
pub fn make_percent(line: &str) -> Option<u8> {
    line.strip_prefix('[')?.split_once('%')?.0.trim().parse().ok()
}

/// The percentage in a line of our own scripts: `progress DONE TOTAL`.
pub fn script_percent(line: &str) -> Option<u8> {
    let mut numbers = line.strip_prefix("progress ")?.split(' ').map(str::parse::<u64>);
    let (done, total) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    u8::try_from(done * 100 / total.max(1)).ok()
}

impl Job {
    /// A job whose output goes to `target/xtask-logs/LOG.log`.
    pub fn new(title: impl Into<String>, log: &str, command: Command) -> Self {
        Self { title: title.into(), command, log: crate::paths::log(log), percent: |_| None }
    }

    /// Reads how far the program is from the lines it prints.
    pub fn percent(mut self, percent: fn(&str) -> Option<u8>) -> Self {
        self.percent = percent;
        self
    }

    /// Runs it to its end, and gives back what it printed on both streams, which is also in the log.
    ///
    /// # Errors
    /// When it does not start or does not succeed: the message holds the log's tail and its path.
    pub fn run(self, ui: &Ui) -> Result<String> {
        let log = self.log.clone();
        self.checked(ui, false)?;
        read_lossy(&log)
    }

    /// Runs it to its end and gives back its standard output; standard error goes to the log.
    ///
    /// # Errors
    /// As [`Job::run`].
    pub fn capture(self, ui: &Ui) -> Result<String> {
        self.checked(ui, true)
    }

    fn checked(mut self, ui: &Ui, split: bool) -> Result<String> {
        let start = Instant::now();
        match self.execute(ui, split) {
            Ok((status, stdout)) if status.success() => {
                ui.done(&self.title, &seconds(start));
                Ok(stdout)
            }
            Ok((status, _)) => {
                ui.done(&self.title, "failed");
                bail!("{}: {status}\n{}", self.title, tail(&self.log)?)
            }
            Err(error) => {
                ui.done(&self.title, "failed");
                Err(error)
            }
        }
    }

    /// Starts the program and reads it to its end. `split`: standard output is gathered, not logged.
    fn execute(&mut self, ui: &Ui, split: bool) -> Result<(ExitStatus, String)> {
        let mut log = create_log(&self.log)?;
        writeln!(log, "$ {:?}", self.command)?;
        ui.begin(&self.title);
        let bar = ui.bar(&self.title);

        let (merged, writer) = io::pipe()?;
        let stdout = if split { Stdio::piped() } else { writer.try_clone()?.into() };
        self.command.stdin(Stdio::null()).stdout(stdout).stderr(writer);
        let program = self.command.get_program().to_owned();
        let mut child =
            self.command.spawn().with_context(|| format!("cannot run {}", Path::new(&program).display()))?;
        // The command holds the pipe's write end; without this the reader never sees the end.
        self.command.stdout(Stdio::null()).stderr(Stdio::null());

        let mut captured = child.stdout.take();
        let gather = std::thread::spawn(move || {
            let mut text = Vec::new();
            captured.as_mut().map_or(Ok(0), |out| out.read_to_end(&mut text)).map(|_| text)
        });
        for line in BufReader::new(merged).split(b'\n') {
            let line = line?;
            log.write_all(&line)?;
            log.write_all(b"\n")?;
            if let Some(percent) = (self.percent)(&String::from_utf8_lossy(&line)) {
                bar.set_position(percent.into());
            }
        }
        let status = child.wait()?;
        bar.finish_and_clear();
        let stdout = gather.join().expect("the reader does not panic")?;
        if !status.success() {
            log.write_all(&stdout)?;
        }
        Ok((status, String::from_utf8_lossy(&stdout).into_owned()))
    }
}

/// A program that runs beside others and ends when this is dropped.
pub struct Server(Child);

impl Server {
    /// Starts `command` with its output in `target/xtask-logs/LOG.log`.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(log: &str, mut command: Command) -> Result<Self> {
        let log = create_log(&crate::paths::log(log))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let program = command.get_program().to_owned();
        Ok(Self(command.spawn().with_context(|| format!("cannot run {}", Path::new(&program).display()))?))
    }

    /// Whether it has ended by itself.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn ended(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_some())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Either it runs and can be killed, or it has ended and there is nothing left to do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `12.3 s`, the time since `start`.
pub fn seconds(start: Instant) -> String {
    format!("{:.1} s", start.elapsed().as_secs_f64())
}

fn create_log(path: &Path) -> Result<File> {
    let dir = path.parent().context("a log has a directory")?;
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    File::create(path).with_context(|| format!("cannot write {}", path.display()))
}

fn read_lossy(path: &Path) -> Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

/// The last lines of a log and where the whole of it is.
pub fn tail(log: &Path) -> Result<String> {
    let text = read_lossy(log)?;
    let lines: Vec<&str> = text.lines().collect();
    let last = lines[lines.len().saturating_sub(TAIL)..].join("\n  | ");
    Ok(format!("  | {last}\n  whole log: {}", log.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages() {
        assert_eq!(make_percent("[ 53%] Building CXX object a.o"), Some(53));
        assert_eq!(make_percent("[100%] Built target llama"), Some(100));
        assert_eq!(make_percent("-- Found Threads: 50%"), None);
        assert_eq!(script_percent("progress 50 200"), Some(25));
        assert_eq!(script_percent("progress 1 0"), Some(100));
        assert_eq!(script_percent("progressive"), None);
    }

    #[test]
    fn a_failing_job_shows_its_log() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 3"]);
        let error = Job::new("failing", "unit-failing", command).run(&Ui::new().inside("test")).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("  | err") && text.contains("unit-failing.log"), "{text}");
    }

    #[test]
    fn captured_output_is_standard_output_alone() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2"]);
        let out = Job::new("split", "unit-split", command).capture(&Ui::new().inside("test")).unwrap();
        assert_eq!(out, "out\n");
    }
}
