#pragma once
typedef struct objc_class* Class; typedef struct objc_object { Class isa; }* id; typedef struct objc_selector* SEL;
typedef struct objc_method* Method; typedef struct Protocol Protocol; typedef bool BOOL;
extern "C" { SEL sel_registerName(const char*); id objc_lookUpClass(const char*); id objc_getProtocol(const char*); Class object_getClass(id); Method class_getInstanceMethod(Class, SEL); const char* method_getTypeEncoding(Method); bool class_addMethod(Class, SEL, void (*)(void), const char*); Class objc_allocateClassPair(Class,const char*,unsigned long); }
