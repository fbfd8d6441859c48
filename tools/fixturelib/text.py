"""The words everything is made from: training text of the tiny tokenizer, source of prompts, chat messages.

Written for this project, so that fixtures carry nobody else's text.
"""

CORPUS = """\
A ship that takes on cargo sinks a little with every crate. Nobody on the quay can see how much water is
left beneath her keel, so a line is painted on the hull: while the line is dry she may be loaded, and when it
touches the water the loading stops. The harbour master does not ask how valuable the next crate is. He looks
at the line.

The same rule serves a machine that answers questions. Every request brings weight: the words it carries, the
pages of memory that its attention needs, the images that must be decoded before anything else can happen. A
server that accepts all of them is kind until the moment it founders, and then it is unkind to everyone aboard.

"How much have we promised?" asked the mate. "Less than we have," said the purser, and he showed her the book.
In the left column stood what was planned, in the middle what was committed, and on the right the highest
water mark of the voyage. The three numbers never changed places: planned was always the largest.

fn main() {
    let pages = (0..16).map(|i| i * 64).collect::<Vec<usize>>();
    for (index, page) in pages.iter().enumerate() {
        if page % 128 == 0 { println!("{index}: {page}"); }
    }
}

def line(hull, water):
    # returns True while the mark is dry
    return hull["mark"] > water.level and not hull.get("storm", False)

Numbers help: 1, 2, 3, 10, 100, 1000; 3.1415, 2.7182, 1e-6; 08:45 on 12/11/1876; 42 tonnes, 7 knots, 365 days.
Tide tables: {"port": "Dover", "high": [6.7, 6.5], "low": [0.8, 1.1]}, checked twice a day, every day.

Größe, Länge und Tiefe: die Marke liegt über dem Wasser. L'été, le navire était plein; la marée montait déjà.
Корабль стоит у причала. 船は港にいる。水位を見る。 The end of the list is written with an arrow → and a tick ✓.

When the wind rose they took in sail, and when it fell they waited. Waiting costs nothing that cannot be
counted. The boy who kept the log wrote one line for every bell: wind, course, speed, depth. When he was asked
why he wrote the depth although they were far from any shore, he said that the shore had moved before. After
that the captain read the log every evening, from the first line to the last, and signed it with her own name.
"""

# Tried in order until one gives a greedy continuation with a clear margin.
CHAT_MESSAGES = [
    "How deep may she be loaded?",
    "Where does the line stand today?",
    "Name three things a purser counts.",
    "What did the boy write in the log?",
    "Is the mark dry?",
    "Who reads the log every evening?",
    "When does the loading stop?",
    "Why is the depth written down?",
    "Tell me about the harbour master.",
    "How many tonnes, how many knots?",
    "Which number is always the largest?",
    "What is the tide at Dover?",
    "What is planned, and what is committed?",
    "May I come aboard?",
    "What happens when the wind falls?",
    "Count the crates on the quay.",
    "Give me the course and the speed.",
    "Please sign the log.",
    "What does waiting cost?",
    "Show me the book.",
    "Has the shore moved?",
    "How high is the water mark of the voyage?",
    "Print the even pages.",
    "Is there a storm?",
]

TOKENIZER_CASES = [
    "",
    " ",
    "a",
    "The line is dry.",
    "  two  spaces\tand\ttabs\n\n\nand lines\r\n",
    "don't can't WE'LL it's I'm",
    "1234567890 3.14 1e-6",
    "Größe → ✓ 船は港にいる。 e\u0301 = é",
    "<|im_start|>user\nhello<|im_end|>\n",
    "text<|endoftext|>more<|im_end",
    "emoji 🚢⚓️ and \u200b zero width",
    "fn main() { println!(\"{}\", 1 << 3); }",
    "trailing space ",
    "\n leading newline",
    "ﬁ ligature Å Å",
]
