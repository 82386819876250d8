"""The sentences: fixed answers, ways to ask, and what people say that has nothing to do with shapes."""

from __future__ import annotations

REFUSAL = "I only know shapes and digits."
GREETING = "Hello! Show me a picture of shapes or a digit."
SHOW_ME = "Please show me a picture of shapes or a digit."
ABILITIES = "I can name, count and find shapes, and read digits."
EMPTY = "An empty picture."
NO_DIGIT = "There is no digit."
NUMBERS = ("None.", "One.", "Two.", "Three.", "Four.", "Five.")
PLACES = (
    *("At the top left.", "At the top.", "At the top right."),
    *("On the left.", "In the centre.", "On the right."),
    *("At the bottom left.", "At the bottom.", "At the bottom right."),
)

CAPTION = (
    *("What is in this picture?", "What is in the picture?", "What is in this image?", "What do you see?"),
    *("Describe the picture.", "Describe this image.", "What does the picture show?", "What can you see here?"),
    *("Describe what you see.", "What's in this image?", "What is this?", "Give a caption.", "Caption this picture."),
    *("What is shown in this picture?", "Tell me what you see.", "What's this?", "What objects are in the image?"),
    *("What is shown here?", "Name everything in the picture.", "Which shapes are there?", "What shapes do you see?"),
)
EXISTS = (
    *("Is there {a} in the picture?", "Is there {a}?", "Do you see {a}?", "Can you see {a}?", "Are there any {many}?"),
    *("Does the picture show {a}?", "Is there {a} in this image?", "Do you see any {many}?", "Is there {a} here?"),
    *("Does the image contain {a}?", "Can you find {a}?", "Are there {many} in the picture?", "Is {a} in the picture?"),
)
COUNT = (
    *("How many {many} are there?", "How many {many} are in the picture?", "How many {many} do you see?"),
    *("Count the {many}.", "How many {many} can you see?", "What is the number of {many}?", "How many {many}?"),
    *("How many {many} are there in this image?", "How many {many} does the picture show?"),
)
COLOUR = (
    *(
        "What colour is {the}?",
        "Which colour is {the}?",
        "What is the colour of {the}?",
        "What colour does {the} have?",
    ),
    *("{The} has which colour?", "Name the colour of {the}.", "Tell me the colour of {the}."),
)
COLOURS_OF_MANY = ("What colour are {the}?", "Which colour are {the}?", "What is the colour of {the}?")
SHAPE = (
    *("What shape is {the}?", "Which shape is {the}?", "What is {the}?", "What kind of shape is {the}?"),
    *("Name the shape of {the}.", "{The} is what kind of shape?"),
)
WHERE = (
    *("Where is {the}?", "Where in the picture is {the}?", "Where do you see {the}?", "Where can I find {the}?"),
    *("What is the position of {the}?", "In which part of the picture is {the}?", "Locate {the}."),
)
SIDES = ("Is {the} {side}?", "Is {the} {side} of the picture?", "Do you see {the} {side}?")
SIZE = ("Is {the} large or small?", "Is {the} small or large?", "How big is {the}?", "What size is {the}?")
IS_SIZE = ("Is {the} {size}?",)
RELATION = ("Is {the} {side} {other}?", "Do you see {the} {side} {other}?", "Is it true that {the} is {side} {other}?")
WHICH = ("What is {side} {other}?", "Which shape is {side} {other}?", "What do you see {side} {other}?")
READ = (
    *("What digit is this?", "Which digit is this?", "Read the digit.", "What number is this?", "Which number is it?"),
    *("What digit do you see?", "What number do you see?", "Which digit is in the picture?", "What number is shown?"),
    *("What is the digit?", "What number is in the picture?", "Which digit is shown?", "Can you read the digit?"),
    *("What digit is written here?", "Read the number.", "What is the number in this image?", "Which number is this?"),
)
IS_DIGIT = ("Is this {a}?", "Is it {a}?", "Is the digit {a}?", "Does the picture show {a}?", "Is there {a}?")
ANY_DIGIT = ("Is there a digit?", "Do you see a digit?", "Is there a number in the picture?", "Is this a digit?")

GREETINGS = (
    *("Hello", "Hi", "Hey", "Hello!", "Hi there", "Good morning", "Good evening", "Hello there!", "Hey there"),
    *("Hi!", "Hello, how are you?", "How are you?", "Greetings", "Good day", "Say hello", "Hello again", "Hallo"),
)
ABILITY = (
    *("What can you do?", "Who are you?", "What are you?", "Help", "How can you help me?", "What do you know?"),
    *("Which questions can you answer?", "What can I ask you?", "Tell me about yourself.", "What is your name?"),
)
ELSEWHERE = (
    *("What is the weather like?", "Who is the president?", "Write a poem about the sea.", "Tell me a joke."),
    *("Explain how a queue works.", "What is the capital of France?", "Is this a cat?", "Is there a dog?"),
    *("How old is the person?", "What is the name of this city?", "Translate this into German.", "What time is it?"),
    *("Who painted this?", "Is it raining?", "Is there a car in the picture?", "How many people are there?"),
    *("What is the man doing?", "What is the woman wearing?", "Is the person happy?", "What is the meaning of life?"),
    *("Write a function that sorts a list.", "What animal is this?", "Which country is this?", "Do you see a house?"),
    *("Summarise the text.", "What does the sign say?", "What food is on the table?", "Where was this photo taken?"),
    *("How does an engine work?", "What is two plus two?", "Tell me a story.", "Why is the sky blue?"),
    *("Recommend a book.", "What brand is the phone?", "Who is this?", "Is there a tree?", "How tall is the building?"),
    *("What breed is the dog?", "Explain the theory of relativity.", "Give me a recipe for soup.", "Is this a bird?"),
)
SYSTEM = (
    *("You are a helpful assistant.", "You are a helpful assistant that answers questions about pictures."),
    *("Answer briefly.", "You are a vision-language model.", "Be concise.", "Answer the questions about the picture."),
)
BRIEFLY = ("Answer briefly.", "Answer in one word.", "Answer with one word.", "Be brief.", "Answer shortly.")
