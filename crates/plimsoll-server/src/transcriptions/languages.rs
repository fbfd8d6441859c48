//! Names of languages by their codes, as instructions to a model spell them.

use crate::http::error::{ApiError, ApiResult, quote};

/// ISO 639 code and English name.
const LANGUAGES: [(&str, &str); 49] = [
    ("ar", "Arabic"),
    ("bg", "Bulgarian"),
    ("bn", "Bengali"),
    ("ca", "Catalan"),
    ("cs", "Czech"),
    ("da", "Danish"),
    ("de", "German"),
    ("el", "Greek"),
    ("en", "English"),
    ("es", "Spanish"),
    ("et", "Estonian"),
    ("fa", "Persian"),
    ("fi", "Finnish"),
    ("fil", "Filipino"),
    ("fr", "French"),
    ("he", "Hebrew"),
    ("hi", "Hindi"),
    ("hr", "Croatian"),
    ("hu", "Hungarian"),
    ("id", "Indonesian"),
    ("is", "Icelandic"),
    ("it", "Italian"),
    ("ja", "Japanese"),
    ("ko", "Korean"),
    ("lt", "Lithuanian"),
    ("lv", "Latvian"),
    ("mk", "Macedonian"),
    ("ms", "Malay"),
    ("nl", "Dutch"),
    ("no", "Norwegian"),
    ("pl", "Polish"),
    ("pt", "Portuguese"),
    ("ro", "Romanian"),
    ("ru", "Russian"),
    ("sk", "Slovak"),
    ("sl", "Slovenian"),
    ("sr", "Serbian"),
    ("sv", "Swedish"),
    ("sw", "Swahili"),
    ("ta", "Tamil"),
    ("te", "Telugu"),
    ("th", "Thai"),
    ("tl", "Tagalog"),
    ("tr", "Turkish"),
    ("uk", "Ukrainian"),
    ("ur", "Urdu"),
    ("vi", "Vietnamese"),
    ("yue", "Cantonese"),
    ("zh", "Chinese"),
];

/// The name of a language that a client gives by its code or its name.
pub(super) fn name(language: &str) -> ApiResult<&'static str> {
    let is = |(code, name): &&(&str, &str)| code.eq_ignore_ascii_case(language) || name.eq_ignore_ascii_case(language);
    LANGUAGES.iter().find(is).map(|(_, name)| *name).ok_or_else(|| {
        let codes: Vec<&str> = LANGUAGES.iter().map(|(code, _)| *code).collect();
        let message = format!("language is `{}`; known are {}", quote(language), codes.join(", "));
        ApiError::unsupported("language", message)
    })
}
