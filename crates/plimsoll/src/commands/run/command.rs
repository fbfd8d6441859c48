//! Lines of a chat that begin with `/`: commands, which never reach the model.

use std::path::PathBuf;

/// Each command's usage and description.
pub const COMMANDS: [(&str, &str); 14] = [
    ("/help", "list these commands"),
    ("/clear", "forget the conversation; settings and system prompt stay"),
    ("/system [TEXT]", "set the system prompt; without TEXT remove it"),
    ("/set [NAME [VALUE]]", "set a sampling parameter; without VALUE back to the default; without NAME list them"),
    ("/show", "show the model, the server, the settings and the size of the conversation"),
    ("/stats", "turn the line with tokens per second on or off"),
    ("/image FILE", "attach an image to the next message"),
    ("/file FILE", "attach a text file to the next message"),
    ("/save NAME", "keep the conversation under this name"),
    ("/load [NAME]", "go on with a kept conversation; without NAME list them"),
    ("/regen", "answer the last message again"),
    ("/model [NAME]", "change the model; without NAME list those of the server"),
    ("/bye", "leave; Ctrl-D and Ctrl-C twice do so too"),
    (r#"""""#, r#"begin and end a message of several lines with """, or end a line with \"#),
];

/// A command of the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// The list of commands.
    Help,
    /// Forget the messages.
    Clear,
    /// Set the system prompt, or remove it.
    System(Option<String>),
    /// List the settings, reset one, or set one.
    Set(Option<(String, Option<String>)>),
    /// Show the model, the server, the settings and the size of the conversation.
    Show,
    /// Turn the line with the speed on or off.
    Stats,
    /// Attach an image.
    Image(PathBuf),
    /// Attach a text file.
    File(PathBuf),
    /// Save the conversation under this name.
    Save(String),
    /// Load a saved conversation, or list them.
    Load(Option<String>),
    /// Answer the last message again.
    Regen,
    /// Change the model, or list the server's models.
    Model(Option<String>),
    /// Leave the chat.
    Bye,
}

impl Command {
    /// Parses a line; none if it is a message.
    ///
    /// # Errors
    /// The command is unknown, or it lacks its argument.
    pub fn parse(line: &str) -> Option<Result<Self, String>> {
        let line = line.trim_end();
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        word.starts_with('/').then(|| Self::of(word, rest.trim()))
    }

    fn of(word: &str, rest: &str) -> Result<Self, String> {
        let optional = || (!rest.is_empty()).then(|| rest.to_owned());
        let needed =
            |what: &str| optional().ok_or_else(|| format!("{word} needs {what}: {word} {}", what.to_uppercase()));
        Ok(match word {
            "/help" | "/?" => Self::Help,
            "/clear" => Self::Clear,
            "/system" => Self::System(optional()),
            "/set" => Self::Set(optional().map(|rest| match rest.split_once(char::is_whitespace) {
                Some((name, value)) => (name.to_owned(), Some(value.trim().to_owned())),
                None => (rest, None),
            })),
            "/show" => Self::Show,
            "/stats" => Self::Stats,
            "/image" => Self::Image(path(&needed("file")?)),
            "/file" => Self::File(path(&needed("file")?)),
            "/save" => Self::Save(needed("name")?),
            "/load" => Self::Load(optional()),
            "/regen" => Self::Regen,
            "/model" => Self::Model(optional()),
            "/bye" | "/exit" | "/quit" => Self::Bye,
            _ => {
                return Err(format!(
                    "unknown command '{word}': /help lists the commands; begin a message with a space to send it"
                ));
            }
        })
    }
}

/// A path as shells write it: with quotes or backslashes, and `~/` for the home directory.
fn path(text: &str) -> PathBuf {
    let quoted = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    let plain = match quoted('"').or_else(|| quoted('\'')) {
        Some(inside) => inside.to_owned(),
        None => {
            let (mut plain, mut escaped) = (String::new(), false);
            for c in text.chars() {
                escaped = c == '\\' && !escaped;
                if !escaped {
                    plain.push(c);
                }
            }
            plain
        }
    };
    match (plain.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
        _ => PathBuf::from(plain),
    }
}

/// Whether an entry continues on the next line: `"""` is open, or the entry ends with a backslash.
pub fn goes_on(entry: &str) -> bool {
    entry.matches(FENCE).count() % 2 == 1 || entry.ends_with('\\')
}

/// Begins and ends a message of several lines.
const FENCE: &str = "\"\"\"";

/// The message of an entry: without the marks that let it have several lines.
pub fn message(entry: &str) -> String {
    let entry = entry.trim();
    match entry.strip_prefix(FENCE).and_then(|rest| rest.strip_suffix(FENCE)) {
        Some(inside) => inside.trim_matches('\n').to_owned(),
        None => entry.replace("\\\n", "\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Command {
        Command::parse(line).expect("a command").unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    #[test]
    fn commands_are_read_with_their_arguments() {
        assert_eq!(parse("/clear "), Command::Clear);
        assert_eq!(parse("/system Be  brief."), Command::System(Some("Be  brief.".into())));
        assert_eq!(parse("/system"), Command::System(None));
        assert_eq!(parse("/set"), Command::Set(None));
        assert_eq!(parse("/set seed"), Command::Set(Some(("seed".into(), None))));
        assert_eq!(parse("/set top_p  0.5"), Command::Set(Some(("top_p".into(), Some("0.5".into())))));
        assert_eq!(parse(r"/file a\ b.txt"), Command::File("a b.txt".into()));
        assert_eq!(parse("/image 'it is \\ here.png'"), Command::Image(r"it is \ here.png".into()));
        assert_eq!(parse("/bye"), parse("/exit"));
        for message in ["hello", " /etc/hosts is what?", "a /help", "\"\"\"/help\"\"\""] {
            assert!(Command::parse(message).is_none(), "{message}");
        }
    }

    #[test]
    fn unknown_command_is_an_error_that_names_help() {
        for line in ["/etc/hosts", "/Help", "/", "/clearr"] {
            let error = Command::parse(line).expect("a command").unwrap_err();
            assert!(error.contains("/help") && error.contains(&format!("'{line}'")), "{error}");
        }
        let error = Command::parse("/save").expect("a command").unwrap_err();
        assert_eq!(error, "/save needs name: /save NAME");
    }

    #[test]
    fn every_listed_command_is_known() {
        for (usage, _) in COMMANDS.iter().filter(|(usage, _)| usage.starts_with('/')) {
            let word = usage.split(' ').next().expect("a word");
            assert!(Command::parse(&format!("{word} x")).expect("a command").is_ok(), "{word}");
        }
    }

    #[test]
    fn messages_have_several_lines_between_fences_or_after_backslashes() {
        assert!(goes_on("\"\"\"a\nb") && !goes_on("\"\"\"a\nb\"\"\"") && goes_on("a\\") && !goes_on("a"));
        assert_eq!(message("\"\"\"\na\n b\n\"\"\""), "a\n b");
        assert_eq!(message("a\\\nb\\\nc"), "a\nb\nc");
        assert_eq!(message("say \"\"\"x\"\"\" twice"), "say \"\"\"x\"\"\" twice");
    }
}
