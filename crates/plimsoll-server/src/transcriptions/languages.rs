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

/// Further languages of Whisper.
const MORE: [(&str, &str); 52] = [
    ("af", "Afrikaans"),
    ("am", "Amharic"),
    ("as", "Assamese"),
    ("az", "Azerbaijani"),
    ("ba", "Bashkir"),
    ("be", "Belarusian"),
    ("bo", "Tibetan"),
    ("br", "Breton"),
    ("bs", "Bosnian"),
    ("cy", "Welsh"),
    ("eu", "Basque"),
    ("fo", "Faroese"),
    ("gl", "Galician"),
    ("gu", "Gujarati"),
    ("ha", "Hausa"),
    ("haw", "Hawaiian"),
    ("ht", "Haitian Creole"),
    ("hy", "Armenian"),
    ("jw", "Javanese"),
    ("ka", "Georgian"),
    ("kk", "Kazakh"),
    ("km", "Khmer"),
    ("kn", "Kannada"),
    ("la", "Latin"),
    ("lb", "Luxembourgish"),
    ("ln", "Lingala"),
    ("lo", "Lao"),
    ("mg", "Malagasy"),
    ("mi", "Maori"),
    ("ml", "Malayalam"),
    ("mn", "Mongolian"),
    ("mr", "Marathi"),
    ("mt", "Maltese"),
    ("my", "Myanmar"),
    ("ne", "Nepali"),
    ("nn", "Nynorsk"),
    ("oc", "Occitan"),
    ("pa", "Punjabi"),
    ("ps", "Pashto"),
    ("sa", "Sanskrit"),
    ("sd", "Sindhi"),
    ("si", "Sinhala"),
    ("sn", "Shona"),
    ("so", "Somali"),
    ("sq", "Albanian"),
    ("su", "Sundanese"),
    ("tg", "Tajik"),
    ("tk", "Turkmen"),
    ("tt", "Tatar"),
    ("uz", "Uzbek"),
    ("yi", "Yiddish"),
    ("yo", "Yoruba"),
];

/// Returns the codes and names of all languages that a decoder of audio may have a token for.
pub(super) fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    LANGUAGES.iter().chain(&MORE).copied()
}

/// Returns whether `language` is the code or the name of this language.
pub(super) fn is(language: &str, (code, name): (&str, &str)) -> bool {
    code.eq_ignore_ascii_case(language) || name.eq_ignore_ascii_case(language)
}

/// Returns the name of a language that a client gives by its code or its name.
pub(super) fn name(language: &str) -> ApiResult<&'static str> {
    LANGUAGES.iter().find(|known| is(language, **known)).map(|(_, name)| *name).ok_or_else(|| {
        let codes: Vec<&str> = LANGUAGES.iter().map(|(code, _)| *code).collect();
        let message = format!("language is `{}`; known are {}", quote(language), codes.join(", "));
        ApiError::unsupported("language", message)
    })
}
