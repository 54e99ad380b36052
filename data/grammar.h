// A stochastic grammar: it writes texts by choices of known probability. The notation, line by
// line:
//
//   # a comment                     A line that starts with blanks continues the one before.
//   @list fruit                     Items separated by commas, equally likely.
//   apple, pear, plum
//   @rule greeting                  Alternatives, one a line, each after its weight.
//   3 "Good day," said {hero}.
//   1 {Hero.he} only nodded.
//   @table person: name, he, him    Rows, equally likely; columns are separated by " | ", and " / "
//   Ann / Eve | she | her           in the first column stands for several rows that share the
//   Tom | he | him                  other columns.
//
// and inside an alternative:
//
//   {fruit}                a choice from that rule. A capital, {Fruit}, capitalises what it writes.
//   {hero:person}          the same, and the row is remembered as hero. {x:table.column} writes
//                          another column.
//   {hero}                 that same text again: no choice.
//   {hero.he}              column "he" of the remembered row. A column is a template, and may have
//                          choices of its own.
//   {friend:person!hero}   a choice among the other rows.
//   (one|two)              a choice among equally likely templates written in place.
//   [30% text ]            text with that probability, else nothing.
//   a {fruit}              "an" if what follows starts with a vowel. What follows must not be an
//                          option.
//   ¶                      (with the blanks around it) a line break.
//
// Weights are integers and choices are made in integers, so the same seed writes the same bytes on
// every machine.
//
// A grammar is unambiguous if every rule is a prefix code: no text of one alternative starts with a
// text of another. A letter after the end of a word counts as a difference, so "sea" and "seal"
// differ, but "red" and "red clay" do not. An option that is not taken writes nothing, so its text
// must differ in the same way from whatever can follow it. Then a reader who proceeds from left to
// right, and knows the rows remembered so far, can tell every choice. A text shows where it ends,
// it has a single derivation, and its probability is the product of its choices' probabilities.
// dev/test/test_corpus.cpp searches all derivations of all validation stories and finds one each.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

struct Symbol;
using Template = std::vector<Symbol>;

struct Symbol {
    enum Kind {
        text,    // writes `literal`
        choose,  // chooses a row of `rule` and writes its `column`; `variable` remembers the row
        repeat,  // writes what `variable` wrote when it was chosen
        recall,  // writes `column` of the row that `variable` remembers
    };
    Kind kind;
    std::string literal = {};
    int rule = -1;
    int column = 0;
    int variable = -1;             // −1 if there is none
    std::vector<int> others = {};  // variables whose rows must not be chosen
    bool capital = false;          // the first letter
    bool article = false;          // the literal before ends in "a": write "n " or " " first
};

struct Alternative {
    uint64_t weight;
    std::vector<Template> columns;
};

struct Rule {
    std::string name;                  // "" for a choice written in place
    std::vector<std::string> columns;  // their names; {""} except in a table
    std::vector<Alternative> alternatives;
};

struct Variable {
    std::string name;
    int rule;  // whose row it remembers
};

struct Grammar {
    std::vector<Rule> rules;
    std::vector<Variable> variables;

    explicit Grammar(const std::string& source);  // throws Error: what, and the line

    int rule(const std::string& name) const;  // −1 if there is none

    // A text of `rule`, written with random stream `index` of `seed`. Throws an Error if a slot
    // uses a row that is not chosen yet, or if {friend:person!hero} excludes all rows.
    std::string write(int rule, uint64_t seed, uint64_t index) const;
};
